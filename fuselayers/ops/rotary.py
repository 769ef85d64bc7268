"""rotary -- rotary position embedding of queries and keys, half-split convention.

    q          [B, H, T, C]   B batch, H query heads, T tokens, C channels of a head (even)
    k          [B, G, T, C]   G key heads
    cos, sin   [T, C / 2]     of position * frequency

    forward    (a, b) = halves of the channels;   (a cos - b sin, b cos + a sin)
    backward   the same with -sin

Saved for backward: cos and sin.

Su et al., "RoFormer", 2021; the half-split pairing of channels (i, i + C/2) is that of GPT-NeoX and Llama.
"""

import torch
from torch import Tensor

__all__ = ["rotary"]


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return (q, k), each position rotated by its angles; dtypes are kept, the rotation is computed in cos's dtype.

    Args:
        q: [B, H, T, C], any float dtype, C even.
        k: [B, G, T, C].
        cos: [T, C / 2], usually float32.
        sin: [T, C / 2].

    Raises:
        ValueError: C is odd, or a shape does not fit q.

    >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> quarter_turn = torch.zeros(1, 1), torch.ones(1, 1)
    >>> rotary(q, q, *quarter_turn)[0].flatten()
    tensor([0., 1.])
    """
    tokens, channels = q.shape[-2:]
    if channels % 2:
        raise ValueError(f"rotary needs an even number of channels per head, got {channels}")
    if k.shape[-2:] != q.shape[-2:]:
        raise ValueError(f"k must end in {[tokens, channels]} to fit q {list(q.shape)}, got {list(k.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (tokens, channels // 2):
            raise ValueError(
                f"{name} must be {[tokens, channels // 2]} to fit q {list(q.shape)}, got {list(table.shape)}"
            )
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
