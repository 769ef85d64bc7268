"""sinusoidal -- y = x + table[:T]: waves of growing length, as in the first transformer.

    x, y                [..., T, D]   T tokens, D model
    table[t, 2 i]       sin(t * base^(-2 i / D))
    table[t, 2 i + 1]   cos(t * base^(-2 i / D))

Vaswani et al. 2017, section 3.5.
"""

import torch
from torch import Tensor

from ..ranges import Positive, in_range
from ..registry import register
from .position import Position

__all__ = ["SinusoidalPosition"]


@register("position", "sinusoidal")
class SinusoidalPosition(Position):
    """Adds a fixed vector per position; works for any length. Where D is odd, the last wave is a sine alone.

    The vectors have a norm of sqrt(D / 2), far above token embeddings of the usual deviation 0.02; the paper scales
    those by sqrt(D), as embedding `token` does with `scale`.

    Args:
        base: the longest wave is about `base` times as long as the shortest, which is 2 pi tokens.

    Raises:
        ValueError: base is not positive and finite.

    >>> SinusoidalPosition()(torch.zeros(1, 2, 2))
    tensor([[[0.0000, 1.0000],
             [0.8415, 0.5403]]])
    """

    @in_range
    def __init__(self, *, base: Positive = 10000.0) -> None:
        super().__init__()
        self.base = base

    def embed(self, x_BTD: Tensor, *, first: int = 0) -> Tensor:
        """[B, T, D] -> [B, T, D] in x's dtype, rounded once."""
        # No table is stored; see Note: [no stored table] in rotary.py.
        tokens, hidden_dim = x_BTD.shape[-2:]
        wave = torch.arange((hidden_dim + 1) // 2, device=x_BTD.device, dtype=torch.float32)
        position = torch.arange(first, first + tokens, device=x_BTD.device, dtype=torch.float32)
        angle = position[:, None] * self.base ** (wave * (-2 / hidden_dim))
        table_TD = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[:, :hidden_dim]
        return (x_BTD + table_TD).to(x_BTD.dtype)

    def extra_repr(self) -> str:
        return f"base={self.base}"
