"""rms_norm -- y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    x, y     [..., N]
    weight   [N]

With unit_offset, as in Gemma, weight holds the difference from one: y = ... * (1 + weight).

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
        unit_offset: whether the weight is the scale minus one. It starts at zero then, and weight decay pulls the scale
            to one.

    Raises:
        ValueError: hidden_dim is below one, eps is negative, or (in forward) x is not [..., N].

    >>> RMSNorm(2)(torch.tensor([3.0, -3.0])).detach().round(decimals=3)
    tensor([ 1., -1.])
    """

    @in_range
    def __init__(self, hidden_dim: Size, *, eps: NotNegative = 1e-6, unit_offset: bool = False) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = nn.Parameter(torch.empty(hidden_dim))
        self.reset_parameters()

    @property
    def weights_mean(self) -> str | None:
        """The meaning of the weight if it is no scale, for `carry_weights`."""
        return "scale less one" if self.unit_offset else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the scale to one."""
        self.weight.fill_(0.0 if self.unit_offset else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        check_last_dim(x, self.hidden_dim)
        return rms_norm(x, weight=self._scale(), eps=self.eps)

    def _join(
        self, x: Tensor, residual: Tensor, bias: Tensor | None, p: float, style: NormStyle
    ) -> Tensor | tuple[Tensor, Tensor]:
        return bias_dropout_residual_rms_norm(
            x, residual, weight=self._scale(), bias=bias, p=p, eps=self.eps, style=style, training=self.training
        )

    def _scale(self) -> Tensor:
        if not self.unit_offset:
            return self.weight
        # In float32 at least: in bfloat16 the sum has seven bits after the point.
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + 1

    def extra_repr(self) -> str:
        return f"{self.hidden_dim}, eps={self.eps}, unit_offset={self.unit_offset}"
