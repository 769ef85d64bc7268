"""dyt -- y = weight * tanh(alpha * x) + bias: Dynamic Tanh, in place of a norm.

    x, y           [..., N]
    alpha          [1]        learned
    weight, bias   [N]

Zhu, Chen, He, LeCun, Liu, "Transformers without normalization", 2025, section 4.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from ..checks import check_last_dim
from ..ranges import Positive, Size, in_range
from ..registry import register
from .norm import Norm

__all__ = ["DynamicTanh"]


@register("norm", "dyt")
class DynamicTanh(Norm):
    """A curve that bounds outliers as a norm does, without statistics of x.

    Args:
        hidden_dim: N, the size of the last dimension.
        alpha: initial value of the learned steepness; section 7 of the paper has others for large language models.
        bias: whether there is a shift beside the scale.

    Raises:
        ValueError: hidden_dim is below one, alpha is not positive and finite, or (in forward) x is not [..., N].

    >>> DynamicTanh(3)(torch.tensor([-1e9, 0.0, 2.0])).detach()
    tensor([-1.0000,  0.0000,  0.7616])
    """

    # Its weight is not the scale of a normalised x; see `carry_weights`.
    weights_mean: ClassVar[str] = "scale of a tanh"

    @in_range
    def __init__(self, hidden_dim: Size, *, alpha: Positive = 0.5, bias: bool = True) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.initial_alpha = alpha
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(hidden_dim))
        self.bias = nn.Parameter(torch.empty(hidden_dim)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set alpha to its initial value, the weight to ones, the bias to zeros."""
        super().reset_parameters()
        self.alpha.fill_(self.initial_alpha)

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N] in x's dtype."""
        check_last_dim(x, self.hidden_dim)
        y = self.weight * (self.alpha * x).tanh()
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.hidden_dim}, alpha={self.initial_alpha}, bias={self.bias is not None}"
