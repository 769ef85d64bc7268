"""skip -- y = x: no norm.

x, y   [..., N]
"""

from torch import Tensor

from ..checks import check_last_dim
from ..ranges import Size, in_range
from ..registry import register
from .norm import Norm

__all__ = ["SkipNorm"]


@register("norm", "skip")
class SkipNorm(Norm):
    """Returns x; `add` is the sum alone.

    Args:
        hidden_dim: N, the size of the last dimension.

    Raises:
        ValueError: hidden_dim is below one, or (in forward) x is not [..., N].

    >>> import torch
    >>> SkipNorm(2)(torch.tensor([3.0, -3.0]))
    tensor([ 3., -3.])
    """

    @in_range
    def __init__(self, hidden_dim: Size) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        check_last_dim(x, self.hidden_dim)
        return x

    def extra_repr(self) -> str:
        return f"{self.hidden_dim}"
