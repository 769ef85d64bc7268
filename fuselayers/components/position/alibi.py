"""alibi -- the score of a query and a key falls linearly with their distance, with a slope for each head.

    bias[h, t, s] = -slope[h] * |first + t - s|      [H, T, S]   H heads, T queries, S = first + T keys

For H heads, P the largest power of two that is at most H:

    slope[h] = 2^(-8 (h + 1) / P)             h < P
    slope[h] = 2^(-4 (2 (h - P) + 1) / P)     h >= P: every second slope of 2 P heads

Press, Smith, Lewis, "Train short, test long", 2021, section 3; for other numbers of heads, the authors' released code.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ..ranges import Size, in_range
from ..registry import register
from .position import Position, check_has_heads

__all__ = ["ALiBiPosition"]


@register("position", "alibi")
class ALiBiPosition(Position):
    """Adds a bias to the scores that grows with the distance; no parameters, any length.

    It is the same on both sides of a token, so it does not depend on whether the attention is causal.

    Args:
        num_heads: H, the number of query heads.

    Raises:
        ValueError: num_heads is below one, or None: the attention has no heads.

    >>> bias_HTS = ALiBiPosition(num_heads=4).bias(torch.zeros(1, 3, 8))
    >>> bias_HTS[:, 2, 1]
    tensor([-0.2500, -0.0625, -0.0156, -0.0039])
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"num_heads"})

    @in_range
    def __init__(self, *, num_heads: Size | None) -> None:
        super().__init__()
        self.num_heads = check_has_heads("alibi", num_heads)

    def bias(self, x_BTD: Tensor, *, first: int = 0) -> Tensor:
        """[B, T, D] -> [H, T, first + T] in x's dtype, rounded once."""
        # No table is stored; see Note: [no stored table] in rotary.py.
        key = torch.arange(first + x_BTD.shape[-2], device=x_BTD.device, dtype=torch.float32)
        distance_TS = (key[first:, None] - key).abs()
        return (distance_TS * -self._slopes(x_BTD.device)[:, None, None]).to(x_BTD.dtype)

    def _slopes(self, device: torch.device) -> Tensor:
        power = 1 << (self.num_heads.bit_length() - 1)
        place = torch.arange(1, self.num_heads + 1, device=device, dtype=torch.float32)
        # The further slopes of 2 P heads are half a step before those of P heads.
        place = torch.where(place <= power, place, place - power - 0.5)
        return torch.exp2(place * (-8 / power))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"
