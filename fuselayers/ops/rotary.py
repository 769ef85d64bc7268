"""rotary -- rotary position embedding of queries and keys, half-split convention.

    q          [B, H, T, C]   B batch, H query heads, T tokens, C channels of a head (even)
    k          [B, G, T, C]   G key heads
    cos, sin   [T, C / 2]     of position * frequency

    forward    (a, b) = halves of the channels;   (a cos - b sin, b cos + a sin)
    backward   the same with -sin

The rotation is computed in the wider of x's and cos's dtypes and rounded to x's once. Saved for backward: cos and sin,
and q and k only where cos or sin needs a gradient.

Su et al., "RoFormer", 2021; the half-split pairing of channels (i, i + C/2) is that of GPT-NeoX and Llama.
"""

import torch
from torch import Tensor

from .shapes import check_floating

__all__ = ["rotary", "rotary_reference"]


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return (q, k), each position rotated by its angles; each keeps its dtype.

    Args:
        q: [B, H, T, C], any float dtype, C even. Any leading shape will do, [T, C] too.
        k: [B, G, T, C], like q but for the number of heads.
        cos: [T, C / 2], usually float32.
        sin: [T, C / 2], of cos's dtype.

    Raises:
        ValueError: q has fewer than two dimensions, C is odd, a shape or a device does not fit q, or sin's dtype is not
            cos's.
        TypeError: a tensor is not floating.

    >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> quarter_turn = torch.zeros(1, 1), torch.ones(1, 1)
    >>> rotary(q, q, *quarter_turn)[0].flatten()
    tensor([0., 1.])
    """
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_floating(name, tensor)
        if tensor.device != q.device:
            raise ValueError(
                f"{name} must be on q's device {q.device}, got {tensor.device}; move it with .to(q.device)"
            )
    if q.dim() < 2:
        raise ValueError(f"q must be [..., T, C], tokens by channels, got {list(q.shape)}")
    tokens, channels = q.shape[-2:]
    if channels % 2:
        raise ValueError(f"rotary needs an even number of channels per head, got {channels}")
    if k.shape[-2:] != q.shape[-2:]:
        raise ValueError(f"k must end in {[tokens, channels]} to fit q {list(q.shape)}, got {list(k.shape)}")
    if k.dim() != q.dim() or k.shape[:-3] != q.shape[:-3]:
        wanted = [*q.shape[:-3], "heads", tokens, channels][-q.dim() :]
        raise ValueError(f"k must be [{', '.join(map(str, wanted))}] to fit q {list(q.shape)}, got {list(k.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (tokens, channels // 2):
            raise ValueError(
                f"{name} must be {[tokens, channels // 2]} to fit q {list(q.shape)}, got {list(table.shape)}"
            )
    if sin.dtype != cos.dtype:
        raise ValueError(f"sin must have cos's dtype {cos.dtype}, got {sin.dtype}; convert it with .to(cos.dtype)")
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What the op means: each pair of channels (i, i + C/2) times the matrix of its rotation."""
    turn_TC22 = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)

    def turned(x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, cos.dtype)
        pairs = torch.stack(x.to(wide).chunk(2, dim=-1), dim=-1)
        products = turn_TC22 * pairs[..., None, :]
        return torch.cat(products.sum(-1).unbind(-1), dim=-1).to(x.dtype)

    return turned(q), turned(k)
