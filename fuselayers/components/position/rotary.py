"""rotary -- queries and keys turned by an angle that grows with their position, as in Llama.

    q             [B, H, T, C]   B batch, H query heads, T tokens, C channels of a head
    k             [B, G, T, C]   G key heads
    angle[t, i]   t * base^(-2 i / C), for i in 0 .. C/2 - 1

Su et al., "RoFormer", 2021, section 3.2.2.
"""

import torch
from torch import Tensor

from ...ops import rotary
from ..registry import register
from .position import Position

__all__ = ["RotaryPosition"]


@register("position", "rotary")
class RotaryPosition(Position):
    """Rotates queries and keys; works for any length and any even number of channels per head.

    Args:
        base: the slowest pair of channels turns about `base` times slower than the fastest.

    Raises:
        ValueError: base is not positive; in `rotate`, the heads have an odd number of channels.

    >>> q = torch.tensor([1.0, 0.0]).repeat(1, 1, 2, 1)
    >>> RotaryPosition().rotate(q, q)[0][0, 0]
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """

    def __init__(self, *, base: float = 10000.0) -> None:
        super().__init__()
        if base <= 0:
            raise ValueError(f"base must be positive, got {base}")
        self.base = base

    def rotate(self, q_BHTC: Tensor, k_BGTC: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, T, C], [B, G, T, C] -> the same shapes and dtypes, rotated."""
        # Note: [no table is kept] T x C/2 angles cost next to nothing beside q and k. A buffer would have to be filled
        # again after a model is built on the meta device, and would bound the length.
        tokens, channels = q_BHTC.shape[-2:]
        pair = torch.arange(channels // 2, device=q_BHTC.device, dtype=torch.float32)
        position = torch.arange(tokens, device=q_BHTC.device, dtype=torch.float32)
        angle = position[:, None] * self.base ** (pair * (-2 / channels))
        return rotary(q_BHTC, k_BGTC, angle.cos(), angle.sin())

    def extra_repr(self) -> str:
        return f"base={self.base}"
