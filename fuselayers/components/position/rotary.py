"""rotary -- queries and keys turned by an angle that grows with their position, as in Llama.

    q             [B, H, T, C]   B batch, H query heads, T tokens, C channels of a head
    k             [B, G, T, C]   G key heads
    angle[t, i]   t * base^(-2 i / W), for i in 0 .. W/2 - 1, where W = fraction * C channels are turned

Su et al., "RoFormer", 2021, section 3.2.2.
"""

import torch
from torch import Tensor

from ...ops import rotary
from ..ranges import Positive, Share, in_range
from ..registry import register
from .position import Position

__all__ = ["RotaryPosition"]


@register("position", "rotary")
class RotaryPosition(Position):
    """Rotates queries and keys; works for any length and any even number of channels per head.

    Args:
        base: the slowest pair of channels turns about `base` times slower than the fastest.
        interleaved: whether neighbours (2 i, 2 i + 1) are a pair, as in GPT-J, and not (i, i + W/2), as in Llama.
        fraction: share of a head's channels that is turned, 0 < fraction <= 1; 0.25 in GPT-NeoX.

    Raises:
        ValueError: base is not positive and finite, or fraction not within its bounds; in `check_head_dim` and
            `rotate`, an odd number of channels would be turned, or none.

    >>> q = torch.tensor([1.0, 0.0]).repeat(1, 1, 2, 1)
    >>> RotaryPosition().rotate(q, q)[0][0, 0]
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """

    @in_range
    def __init__(self, *, base: Positive = 10000.0, interleaved: bool = False, fraction: Share = 1.0) -> None:
        super().__init__()
        self.base = base
        self.interleaved = interleaved
        self.fraction = fraction

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError unless the share of `head_dim` channels that is turned makes pairs."""
        turned = self._turned(head_dim)
        if turned < 2 or turned % 2:
            share = "" if self.fraction == 1 else f" ({self.fraction} of {head_dim})"
            raise ValueError(f"rotary needs an even number of channels per head, two at least, got {turned}{share}")

    def _turned(self, channels: int) -> int:
        # Rounded down, as GPT-NeoX and Phi do.
        return channels if self.fraction == 1 else int(channels * self.fraction)

    def rotate(self, q_BHTC: Tensor, k_BGTC: Tensor, *, first: int = 0) -> tuple[Tensor, Tensor]:
        """[B, H, T, C], [B, G, T, C] -> the same shapes and dtypes, rotated."""
        # Note: [no table is kept] T x W/2 angles cost next to nothing beside q and k. A buffer would have to be filled
        # again after a model is built on the meta device, and would bound the length.
        tokens, channels = q_BHTC.shape[-2:]
        self.check_head_dim(channels)
        turned = self._turned(channels)
        pair = torch.arange(turned // 2, device=q_BHTC.device, dtype=torch.float32)
        position = torch.arange(first, first + tokens, device=q_BHTC.device, dtype=torch.float32)
        angle = position[:, None] * self.base ** (pair * (-2 / turned))
        return rotary(q_BHTC, k_BGTC, angle.cos(), angle.sin(), interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"base={self.base}, interleaved={self.interleaved}, fraction={self.fraction}"
