"""linear -- the linear layer of all components.

x, y   [..., K], [..., N]   K in_features, N out_features
"""

from torch import Tensor, nn

from ..ops import linear


class Linear(nn.Linear):
    """`nn.Linear` with the product of `ops.linear`, which takes the faster library on a CPU.

    The arguments, parameters and keys of the state_dict are those of `nn.Linear`.

    >>> Linear(2, 3)
    Linear(in_features=2, out_features=3, bias=True)
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return linear(x, self.weight, self.bias)
