"""Attention by torch's flex attention, which compiles a kernel for a `BlockMask` and skips the blocks it hides.

    q, y   [B, H, T, C]   B batch, H query heads, T queries, C channels of a head
    k, v   [B, G, S, C]   G key-value heads, S keys

The other rules of `ops.attention` change the score of each pair.

On a CPU torch runs the unfused formula, which has no backward. The tests use it.

Dong et al., "Flex attention", 2024.
"""

import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention

from ..._torch.dispatch import is_compiling
from ..._torch.guards import need_cache_folder
from ...errors import warn_once
from ...ops.attention.by_torch import is_grouped

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    mask: BlockMask,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    first: int,
    soft_cap: float | None,
    sinks: Tensor | None,
    distance_bias: Tensor | None,
    key_padding_mask: Tensor | None,
) -> Tensor:
    """Return the result of every query, [B, H, T, C]. The rules are those of `ops.attention`.

    Raises:
        NotImplementedError: a gradient is needed on a CPU.
    """
    # Under autocast a norm of queries and keys leaves them in float32, but the kernel needs a single dtype.
    q_BHTC, k_BGSC = q_BHTC.to(v_BGSC.dtype), k_BGSC.to(v_BGSC.dtype)
    attend: Callable[..., Any] = flex_attention
    # Inside a compiled graph the compiler also compiles this call. A CPU runs the formula.
    if q_BHTC.device.type != "cpu" and not is_compiling():
        absent = (tensor is None for tensor in (sinks, distance_bias, key_padding_mask))
        rules = (scale, causal, window, soft_cap, *absent)
        sizes = q_BHTC.shape[1], q_BHTC.shape[3], k_BGSC.shape[1], v_BGSC.shape[3], q_BHTC.dtype, q_BHTC.device
        attend = _compiled_flex((*rules, getattr(mask.mask_mod, "__code__", None), *sizes))
    result = attend(
        q_BHTC,
        k_BGSC,
        v_BGSC,
        score_mod=_score_mod(causal, window, first, soft_cap, distance_bias, key_padding_mask, q_BHTC.shape[2]),
        block_mask=mask,
        scale=scale,
        enable_gqa=is_grouped(q_BHTC, k_BGSC),
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        return cast(Tensor, result)
    y_BHTC, aux = cast(tuple[Tensor, AuxOutput], result)
    assert aux.lse is not None
    # The keys get sum / (sum + exp(sink)) of the weight; the sum is over their exp(score).
    share_BHT = torch.sigmoid(aux.lse - sinks[:, None])
    return y_BHTC * share_BHT[..., None].to(y_BHTC.dtype)


# Note: [one compiled function per kind] Dynamo counts compilations per code object. After eight it runs the function
# uncompiled, which for flex attention is a formula with all scores in memory. Dynamo also makes a number dynamic if it
# changed between two compilations of the same function name and line, and flex attention does not support a dynamic
# cap. So each kind gets a separate code object and name.
_number = itertools.count()


@functools.lru_cache(maxsize=256)
def _compiled_flex(kind: tuple[Hashable, ...]) -> Callable[..., Any]:
    """Return the function for what a kernel is compiled for, except numbers of sequences, queries and keys."""

    def fused(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, **options: Any) -> Any:
        if not is_compiling():
            warn_once(
                "flex attention runs torch's unfused formula, with all scores in memory: torch.compile is off, or "
                "reached its recompile limit for these rules; then raise torch._dynamo.config.recompile_limit"
            )
        return flex_attention(q_BHTC, k_BGSC, v_BGSC, **options)

    fused.__code__ = fused.__code__.replace(co_name=f"flex_attention_{next(_number)}")
    need_cache_folder()
    return torch.compile(fused)


def _score_mod(
    causal: bool,
    window: int | None,
    first: int,
    soft_cap: float | None,
    bias_HN: Tensor | None,
    padding_BS: Tensor | None,
    tokens: int,
) -> ScoreMod | None:
    """Return the function that changes each score, or None for no change."""
    if not causal and all(rule is None for rule in (window, soft_cap, bias_HN, padding_BS)):
        return None

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if bias_HN is not None:
            score = score + bias_HN[head, key - query + tokens - 1]
        gap = first + query - key
        if causal:
            score = torch.where(gap >= 0, score, -torch.inf)
        if window is not None:
            score = torch.where((gap < window) & (gap > -window), score, -torch.inf)
        if padding_BS is not None:
            score = torch.where(padding_BS[batch, key], score, -torch.inf)
        return score

    return changed
