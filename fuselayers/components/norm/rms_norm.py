"""rms_norm -- y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    x, y     [..., N]
    weight   [N]

Zhang, Sennrich 2019.
"""

import torch
from torch import Tensor, nn

from ...ops import NormStyle, bias_dropout_residual_rms_norm, rms_norm
from ..checks import check_last_dim
from ..ranges import NotNegative, Size, in_range
from ..registry import register
from .norm import Norm

__all__ = ["RMSNorm"]


@register("norm", "rms_norm")
class RMSNorm(Norm):
    """Root mean square normalisation: a scale, no mean and no shift; `add` is one fused op.

    Args:
        hidden_dim: N, the size of the last dimension.
        eps: added to the mean square.

    Raises:
        ValueError: hidden_dim is below one, eps is negative, or (in forward) x is not [..., N].

    >>> RMSNorm(2)(torch.tensor([3.0, -3.0])).detach().round(decimals=3)
    tensor([ 1., -1.])
    """

    @in_range
    def __init__(self, hidden_dim: Size, *, eps: NotNegative = 1e-6) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        check_last_dim(x, self.hidden_dim)
        return rms_norm(x, weight=self.weight, eps=self.eps)

    def _join(
        self, x: Tensor, residual: Tensor, bias: Tensor | None, p: float, style: NormStyle
    ) -> Tensor | tuple[Tensor, Tensor]:
        return bias_dropout_residual_rms_norm(
            x, residual, weight=self.weight, bias=bias, p=p, eps=self.eps, style=style, training=self.training
        )

    def extra_repr(self) -> str:
        return f"{self.hidden_dim}, eps={self.eps}"
