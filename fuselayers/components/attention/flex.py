"""Attention by torch's flex attention, which compiles a kernel for the rules and skips the blocks they hide.

    q, y   [B, H, T, C]   B batch, H query heads, T queries, C channels of a head
    k, v   [B, G, S, C]   G key-value heads, S keys

Rules that depend only on positions (causal, window) become a `BlockMask`, whose hidden blocks are never computed. Rules
that depend on tensors (padding, masks, biases), and the cap, change the score of each pair.

On a CPU torch runs the unfused formula, which has no backward. The tests use it.

Dong et al., "Flex attention", 2024.
"""

import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask, flex_attention

from ..._torch.dispatch import dispatch_mode_is_active, is_compiling
from ..._torch.guards import need_cache_folder
from ...errors import say_once
from .masks import Rules

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, rules: Rules) -> Tensor:
    """Return the result of every query: [B, H, T, C].

    Raises:
        NotImplementedError: a gradient is needed on a CPU.
    """
    batch, heads, tokens, _ = q_BHTC.shape
    keys = k_BGSC.shape[-2]
    # Under autocast a norm of queries and keys leaves them in float32, but the kernel needs a single dtype.
    q_BHTC, k_BGSC = q_BHTC.to(v_BGSC.dtype), k_BGSC.to(v_BGSC.dtype)
    causal, window = rules.hides_future(keys), rules.window if rules.hides_far(keys) else None
    blocks, by_place, mask_BHTS = None, None, None
    if isinstance(rules.mask, BlockMask):
        blocks = rules.mask
        by_place = _by_place(causal, window, rules.first)
    else:
        # A dispatch mode may create special tensors, as FakeTensorMode does. They must not enter the cache.
        special = is_compiling() or dispatch_mode_is_active()
        make_blocks = _make_blocks if special else _cached_blocks
        blocks = make_blocks(causal, window, rules.first, tokens, keys, q_BHTC.device)
        mask_BHTS = None if rules.mask is None else rules.mask.expand(batch, heads, tokens, keys)
    attend: Callable[..., Any] = flex_attention
    # Inside a compiled graph the compiler also compiles this call. A CPU runs the formula.
    if q_BHTC.device.type != "cpu" and not is_compiling():
        attend = _compiled_flex(_kind(q_BHTC, k_BGSC, v_BGSC, rules._replace(causal=causal, window=window)))
    result = attend(
        q_BHTC,
        k_BGSC,
        v_BGSC,
        score_mod=_score_mod(rules, by_place, mask_BHTS),
        block_mask=blocks,
        scale=rules.scale,
        enable_gqa=is_grouped(q_BHTC, k_BGSC),
        return_aux=None if rules.sinks_H is None else AuxRequest(lse=True),
    )
    if rules.sinks_H is None:
        return cast(Tensor, result)
    y_BHTC, aux = cast(tuple[Tensor, AuxOutput], result)
    assert aux.lse is not None
    # The keys get sum / (sum + exp(sink)) of the weight; the sum is over their exp(score).
    share_BHT = torch.sigmoid(aux.lse - rules.sinks_H[:, None])
    return y_BHTC * share_BHT[..., None].to(y_BHTC.dtype)


def is_grouped(q_BHTC: Tensor, k_BGSC: Tensor) -> bool:
    """Return whether query heads share keys. Used for the argument `enable_gqa` of torch's kernels."""
    # A branch: with symbolic sizes neither the comparison nor, under Dynamo, bool() of it is a bool.
    grouped = False
    if k_BGSC.shape[1] < q_BHTC.shape[1]:
        grouped = True
    return grouped


def _kind(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, rules: Rules) -> tuple[Hashable, ...]:
    """Return what a kernel is compiled for, except batch size, query and key counts, and first position."""
    tensors = (rules.sinks_H, rules.bias_HTS, rules.key_padding_mask, rules.mask)
    return (
        *(rules.scale, rules.causal, rules.window, rules.soft_cap, *(tensor is None for tensor in tensors)),
        getattr(rules.mask.mask_mod, "__code__", None) if isinstance(rules.mask, BlockMask) else None,
        *(q_BHTC.shape[1], q_BHTC.shape[3], k_BGSC.shape[1], v_BGSC.shape[3], q_BHTC.dtype, q_BHTC.device),
    )


# Note: [one compiled function per kind] Dynamo counts compilations per code object. After eight it runs the function
# uncompiled, which for flex attention is a formula with all scores in memory. Dynamo also makes a number dynamic if it
# changed between two compilations of the same function name and line, and flex attention does not support a dynamic
# cap. So each kind gets a separate code object and name.
_number = itertools.count()


@functools.lru_cache(maxsize=256)
def _compiled_flex(kind: tuple[Hashable, ...]) -> Callable[..., Any]:
    def fused(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, **options: Any) -> Any:
        if not is_compiling():
            say_once(
                "flex attention runs torch's unfused formula, with all scores in memory: torch.compile is off, or "
                "reached its recompile limit for these rules; then raise torch._dynamo.config.recompile_limit"
            )
        return flex_attention(q_BHTC, k_BGSC, v_BGSC, **options)

    fused.__code__ = fused.__code__.replace(co_name=f"flex_attention_{next(_number)}")
    need_cache_folder()
    return torch.compile(fused)


def _by_place(causal: bool, window: int | None, first: int) -> MaskMod | None:
    """Return the rules that depend only on positions, or None if they hide nothing."""
    if not causal and window is None:
        return None

    def look(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        gap = first + query - key
        if window is None:
            return gap >= 0
        return (gap < window) & (gap >= 0 if causal else gap > -window)

    return look


def _make_blocks(
    causal: bool, window: int | None, first: int, tokens: int, keys: int, device: torch.device
) -> BlockMask | None:
    look = _by_place(causal, window, first)
    return None if look is None else create_block_mask(look, None, None, tokens, keys, device=device)


@functools.lru_cache(maxsize=64)
def _cached_blocks(
    causal: bool, window: int | None, first: int, tokens: int, keys: int, device: torch.device
) -> BlockMask | None:
    # A later call may need a gradient, and a tensor from inference mode cannot be saved for backward.
    with torch.inference_mode(False):
        return _make_blocks(causal, window, first, tokens, keys, device)


def _score_mod(rules: Rules, by_place: MaskMod | None, mask_BHTS: Tensor | None) -> ScoreMod | None:
    """Return the function that changes each score, or None for no change."""
    soft_cap, bias_HTS, padding_BS = rules.soft_cap, rules.bias_HTS, rules.key_padding_mask
    hiding = (by_place, mask_BHTS, padding_BS)
    if soft_cap is None and bias_HTS is None and all(rule is None for rule in hiding):
        return None

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if bias_HTS is not None:
            score = score + bias_HTS[head, query, key]
        if by_place is not None:
            score = torch.where(by_place(batch, head, query, key), score, -torch.inf)
        if mask_BHTS is not None:
            score = torch.where(mask_BHTS[batch, head, query, key], score, -torch.inf)
        if padding_BS is not None:
            score = torch.where(padding_BS[batch, key], score, -torch.inf)
        return score

    return changed
