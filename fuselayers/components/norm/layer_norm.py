"""layer_norm -- y = (x - mean) / sqrt(var + eps) * weight + bias, over the last dimension.

    x, y           [..., N]
    weight, bias   [N]

Ba, Kiros, Hinton 2016.
"""

import torch
from torch import Tensor, nn

from ...ops import NormStyle, bias_dropout_residual_layer_norm, layer_norm
from ..checks import check_last_dim
from ..ranges import NotNegative, Size, in_range
from ..registry import register
from .norm import Norm

__all__ = ["LayerNorm"]


@register("norm", "layer_norm")
class LayerNorm(Norm):
    """Layer normalisation, with torch's names for its parameters; `add` is one fused op.

    Args:
        hidden_dim: N, the size of the last dimension.
        eps: added to the variance.
        bias: whether there is a shift beside the scale.

    Raises:
        ValueError: hidden_dim is below one, eps is negative, or (in forward) x is not [..., N].

    >>> norm = LayerNorm(2)
    >>> normed, total = norm.add(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))
    >>> total
    tensor([1., 3.])
    """

    @in_range
    def __init__(self, hidden_dim: Size, *, eps: NotNegative = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_dim))
        self.bias = nn.Parameter(torch.empty(hidden_dim)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        check_last_dim(x, self.hidden_dim)
        return layer_norm(x, weight=self.weight, bias=self.bias, eps=self.eps)

    def _join(
        self, x: Tensor, residual: Tensor, bias: Tensor | None, p: float, style: NormStyle
    ) -> Tensor | tuple[Tensor, Tensor]:
        return bias_dropout_residual_layer_norm(
            x,
            residual,
            weight=self.weight,
            norm_bias=self.bias,
            bias=bias,
            p=p,
            eps=self.eps,
            style=style,
            training=self.training,
        )

    def extra_repr(self) -> str:
        return f"{self.hidden_dim}, eps={self.eps}, bias={self.bias is not None}"
