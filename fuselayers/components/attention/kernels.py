"""Three ways to compute attention: torch's fused kernels, flex attention, and the plain formula.

    q, y   [B, H, T, C]   B batch, H query heads, T queries, C channels of a head
    k, v   [B, G, S, C]   G key-value heads, S keys; query head h uses key-value head h // (H / G)

    score  = scale q k^T;   soft_cap tanh(score / soft_cap);   + bias
    weight = exp(score) / (exp(sink) + sum over the allowed keys of exp(score)),   y = dropout(weight) v

A query without any allowed key gets zeros, and has zero gradients.

Soft cap: Gemma Team 2024, section 2; sinks: OpenAI, "gpt-oss model card", 2025, section 2.
"""

from typing import Final, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch.dispatch import is_compiling
from ...ops import dropout
from ..layout import WHOLE, Layout
from .flex import flex, is_grouped
from .masks import Rules, allowed_keys

Kernel = Literal["auto", "sdpa", "flex", "plain"]
KERNELS: Final[tuple[Kernel, ...]] = get_args(Kernel)

# The number of channels that a sink adds to queries and keys. One is used; eight keep rows of 16-bit values aligned to
# 16 bytes.
_SINK_CHANNELS: Final = 8


def attend(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    rules: Rules,
    *,
    kernel: Kernel = "auto",
    p: float,
    layout: Layout = WHOLE,
) -> Tensor:
    """Return the result of every query: [B, H, T, C].

    Used by every attention with a softmax.

    Args:
        q_BHTC: the queries.
        k_BGSC: the keys.
        v_BGSC: the values.
        rules: the allowed keys, and the changes to the scores.
        kernel: the implementation; "auto" chooses one.
        p: probability of dropping an attention probability; above 0 the plain formula runs, because dropout must use
            the library's mask, which is the same on every backend.
        layout: the part of all heads that this process has.

    >>> q, k, v = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 3, 2), torch.arange(6.0).view(1, 1, 3, 2)
    >>> attend(q, k, v, Rules(scale=1.0, window=2), p=0.0)
    tensor([[[[1., 2.]]]])
    """
    if kernel == "auto":
        kernel = _chosen(q_BHTC, k_BGSC, rules)
    if kernel == "flex" and q_BHTC.shape[0] == 0:
        # The formula that flex runs on a CPU fails for most empty batches. An empty batch needs no mask, and only flex
        # takes a BlockMask.
        kernel, rules = "plain", rules._replace(mask=None)
    if p > 0 or kernel == "plain":
        return _plain(q_BHTC, k_BGSC, v_BGSC, rules, p=p, layout=layout)
    if kernel == "flex":
        return flex(q_BHTC, k_BGSC, v_BGSC, rules)
    return _sdpa(q_BHTC, k_BGSC, v_BGSC, rules)


def _chosen(q_BHTC: Tensor, k_BGSC: Tensor, rules: Rules) -> Kernel:
    tokens, channels = q_BHTC.shape[-2:]
    # With a mask, sdpa reads all T x S entries; flex skips the blocks that a window hides, and supports caps. flex is
    # compiled for its shapes, so it does not suit generation with single tokens. Under another compiler plain ops run,
    # since the partitioners understand those.
    if (
        (rules.soft_cap is not None or rules.window is not None or rules.sinks_H is not None)
        and q_BHTC.device.type == "cuda"
        and not is_compiling()
        and q_BHTC.dtype in (torch.float16, torch.bfloat16)
        and channels >= 16
        and tokens == k_BGSC.shape[-2]
        and tokens >= 128
    ):
        return "flex"
    return "sdpa" if rules.soft_cap is None else "plain"


def _sdpa(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, rules: Rules) -> Tensor:
    """Attention by torch's `scaled_dot_product_attention`, which does not support a cap."""
    tokens, keys = q_BHTC.shape[-2], k_BGSC.shape[-2]
    # is_causal lets the kernel skip half of the work, so a mask is built only for other rules.
    others = (rules.sinks_H, rules.bias_HTS, rules.key_padding_mask, rules.mask)
    causal = rules.causal and tokens == keys and not rules.hides_far(keys)
    causal = causal and all(other is None for other in others)
    mask = None if causal else allowed_keys(rules, tokens, keys, q_BHTC.device)
    bias_HTS = rules.bias_HTS
    if rules.sinks_H is not None:
        q_BHTC, k_BGSC, v_BGSC = _with_sink(q_BHTC, k_BGSC, v_BGSC, rules.sinks_H / rules.scale)
        mask = None if mask is None else F.pad(mask, (0, 1), value=True)
        bias_HTS = None if bias_HTS is None else F.pad(bias_HTS, (0, 1))
    if bias_HTS is not None:
        bias_HTS = bias_HTS.to(q_BHTC.dtype)
        mask = bias_HTS[None] if mask is None else bias_HTS.masked_fill(~mask, -torch.inf)
    y_BHTC = F.scaled_dot_product_attention(
        q_BHTC,
        k_BGSC,
        v_BGSC,
        attn_mask=mask,
        is_causal=causal,
        scale=rules.scale,
        enable_gqa=is_grouped(q_BHTC, k_BGSC),
    )
    return y_BHTC if rules.sinks_H is None else y_BHTC[..., : v_BGSC.shape[-1] - _SINK_CHANNELS]


def _with_sink(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, unscaled_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Note: [a sink as a key] An extra key whose value is zero adds only to the denominator. Its score must be the
    # head's sink for every query. An additive mask would need H x T x S numbers with a gradient, which no fused kernel
    # supports. An extra channel, with the sink in every query and a one in the extra key, costs next to nothing.
    batch, heads, tokens, channels = q_BHTC.shape
    sink_BHT1 = unscaled_H.to(q_BHTC.dtype)[:, None, None].expand(batch, heads, tokens, 1)
    q_BHTC = torch.cat((q_BHTC, F.pad(sink_BHT1, (0, _SINK_CHANNELS - 1))), dim=-1)
    key_C = F.pad(k_BGSC.new_ones(1), (channels, _SINK_CHANNELS - 1))
    key_BG1C = key_C.expand(batch, k_BGSC.shape[1], 1, -1)
    k_BGSC = torch.cat((F.pad(k_BGSC, (0, _SINK_CHANNELS)), key_BG1C), dim=-2)
    return q_BHTC, k_BGSC, F.pad(v_BGSC, (0, _SINK_CHANNELS, 0, 1))


def _plain(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, rules: Rules, *, p: float, layout: Layout) -> Tensor:
    """Attention in plain torch, which saves B x H x T x S probabilities for backward."""
    batch, heads, tokens, _ = q_BHTC.shape
    groups, keys = k_BGSC.shape[1:3]
    # The R query heads that share keys become additional queries, so that keys and values are not copied. The queries
    # are scaled, since they are usually smaller than the scores.
    q_BGXC = torch.unflatten(q_BHTC * rules.scale, 1, (groups, heads // groups)).flatten(2, 3)  # X = R x T
    scores_BHTS = (q_BGXC @ k_BGSC.transpose(-2, -1)).reshape(batch, heads, tokens, keys)
    if rules.soft_cap is not None:
        scores_BHTS = rules.soft_cap * torch.tanh(scores_BHTS / rules.soft_cap)
    if rules.bias_HTS is not None:
        scores_BHTS = scores_BHTS + rules.bias_HTS.to(scores_BHTS.dtype)
    hidden = allowed_keys(rules, tokens, keys, q_BHTC.device)
    if hidden is not None:
        hidden = ~hidden
        # Not -inf, which would make a row without any allowed key 0 / 0, also in backward. The second fill sets such a
        # row to zero.
        scores_BHTS = scores_BHTS.masked_fill(hidden, torch.finfo(scores_BHTS.dtype).min)
    if rules.sinks_H is not None:
        sink_BHT1 = rules.sinks_H.to(scores_BHTS.dtype)[:, None, None].expand(batch, heads, tokens, 1)
        scores_BHTS = torch.cat((scores_BHTS, sink_BHT1), dim=-1)
    weights_BHTS = scores_BHTS.softmax(-1)
    if rules.sinks_H is not None:
        weights_BHTS = weights_BHTS[..., :-1]
    if hidden is not None:
        weights_BHTS = weights_BHTS.masked_fill(hidden, 0.0)
    weights_BHTS = dropout(weights_BHTS, p, shard=layout.shard(weights_BHTS, 1)) if p > 0 else weights_BHTS
    weights_BGXS = torch.unflatten(weights_BHTS, 1, (groups, heads // groups)).flatten(2, 3)
    return (weights_BGXS @ v_BGSC).reshape(batch, heads, tokens, v_BGSC.shape[-1])
