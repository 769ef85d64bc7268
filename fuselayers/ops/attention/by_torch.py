"""Attention by torch's `scaled_dot_product_attention`, for calls without dropout and without a cap."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .formula import allowed_keys, bias_of_dtype, bias_of_scores

__all__ = ["attention_by_torch", "is_grouped"]

# The number of channels that a sink adds to queries and keys. One is used; eight keep rows of 16-bit values aligned to
# 16 bytes.
_SINK_CHANNELS = 8


def attention_by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    key_padding_mask: Tensor | None,
    mask: Tensor | None,
    documents: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    first: int,
) -> Tensor:
    """Return the op's result. The arguments are those of the registered ops; see `registered`."""
    tokens, keys = q.shape[-2], k.shape[-2]
    # is_causal lets the kernel skip half of the work, so a mask is built only for other rules.
    bias = None if bias is None else bias_of_scores(bias, keys)
    others = bias, sinks, key_padding_mask, mask, documents
    hides_far = window is not None and window < keys
    is_causal = causal and first == 0 and 1 < tokens == keys and not hides_far
    is_causal = is_causal and all(other is None for other in others)
    allowed = None
    if not is_causal:
        allowed = allowed_keys(key_padding_mask, mask, documents, causal, window, first, tokens, keys, q.device)
    if sinks is not None:
        if scale == 0:  # by which a sink cannot be divided
            q, scale = q * 0, 1.0
        limit = torch.finfo(q.dtype).max  # an infinite sink times the other keys' zeros would be NaN
        q, k, v = _with_sink(q, k, v, (sinks / scale).clamp(-limit, limit))
        allowed = None if allowed is None else F.pad(allowed, (0, 1), value=True)
        bias = None if bias is None else F.pad(bias, (0, 1))
    if bias is not None:
        bias = bias_of_dtype(bias, q.dtype)
        allowed = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    grouped = is_grouped(q, k)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return y if sinks is None else y[..., : v.shape[-1] - _SINK_CHANNELS]


def is_grouped(q: Tensor, k: Tensor) -> bool:
    """Return whether query heads share keys. Used for the argument `enable_gqa` of torch's kernels."""
    # A branch: with symbolic sizes neither the comparison nor, under Dynamo, bool() of it is a bool.
    grouped = False
    if k.shape[1] < q.shape[1]:
        grouped = True
    return grouped


def _with_sink(q: Tensor, k: Tensor, v: Tensor, unscaled_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Note: [a sink as a key] An extra key whose value is zero adds only to the denominator. Its score must be the
    # head's sink for every query. An additive mask would need H x T x S numbers with a gradient, which no fused kernel
    # supports. An extra channel, with the sink in every query and a one in the extra key, costs next to nothing.
    batch, heads, tokens, channels = q.shape
    sink_BHT1 = unscaled_H.to(q.dtype)[:, None, None].expand(batch, heads, tokens, 1)
    q = torch.cat((q, F.pad(sink_BHT1, (0, _SINK_CHANNELS - 1))), dim=-1)
    key_C = F.pad(k.new_ones(1), (channels, _SINK_CHANNELS - 1))
    k = torch.cat((F.pad(k, (0, _SINK_CHANNELS)), key_C.expand(batch, k.shape[1], 1, -1)), dim=-2)
    return q, k, F.pad(v, (0, _SINK_CHANNELS, 0, 1))
