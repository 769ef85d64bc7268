"""The two registered ops, which run the kernels: forward and backward are one node each in a graph.

    q                  [B, H, T, C]              B batch, H query heads, T queries, C channels of a head
    k                  [B, G, S, C]              G key-value heads, S keys
    v                  [B, G, S, E]              E channels of a value
    y, dy              [B, H, T, E]              y lies in memory as [B, T, H, E], as the next projection reads it
    lse                [B, H, T]                 float32, the base-2 logarithm of the sum of exp(score), the sink
                                                 included; inf for a query without any allowed key
    bias               [B|1, H|1, T|1, S]        any float dtype; or a table of distances [H, T + S - 1]
    sinks              [H]                       any float dtype
    key_padding_mask   [B, S]                    bool
    mask               [B|1, H|1, T|1, S]        bool
    documents          [B, S]                    int64
    seed               []                        int64

    first_row, rows_of_batch, rows_of_head, first_column
                       the shard: the weights of (b, h, t) are row first_row + b rows_of_batch + h rows_of_head + t of
                       dropout's mask, from first_column on, a multiple of 8. All are 0 for a whole tensor.

Backward returns dq, dk, dv, dbias and dsinks. dbias is empty unless `wants_bias`, dsinks without sinks.
"""

import ctypes
import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..cpu import TYPES, Heads, pointer, run
from ..implementations import define, in_cpp
from ..philox import mask_numbers
from .kernels import launch_backward, launch_forward, with_adjacent_channels

__all__ = ["attention_backward", "attention_forward"]

_OPTIONS: Final = (
    "Tensor? bias, Tensor? sinks, Tensor? key_padding_mask, Tensor? mask, Tensor? documents, Tensor? seed, "
    "float scale, bool causal, SymInt? window, SymInt first, float? soft_cap, float p, "
    "SymInt first_row, SymInt rows_of_batch, SymInt rows_of_head, SymInt first_column"
)
_PROBABILITY: Final = _OPTIONS.split(", ").index("float p")
# Backward of few heads divides the keys among tasks, in chunks of a size that makes the sum of their parts of dq cheap.
# A part is as large as dq in float32. There are at most four, or as many as have 32 heads together: query heads that
# share keys, or a bias, make few tasks but large parts.
_TASKS: Final = 32
_KEYS_OF_CHUNK: Final = 512
_PARTS: Final = 4


def _launch_forward(q: Tensor, k: Tensor, v: Tensor, *rules: Any) -> tuple[Tensor, Tensor]:
    y, lse = _empty_forward(q, k, v)
    if rules[_PROBABILITY] == 1:
        return y.zero_(), lse.zero_()
    if y.numel() and not in_cpp(q):
        launch_forward(q, k, v, y, lse, *rules)
    elif y.numel():
        problem, _alive = _problem(q, k, v, *rules)
        run("attention_forward", ctypes.byref(problem), Heads.of(y), pointer(lse))
    return y, lse


def _launch_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *rules_and_wish: Any
) -> tuple[Tensor, ...]:
    *rules, wants_bias = rules_and_wish
    gradients = _empty_backward(dy, q, k, v, y, lse, *rules, wants_bias)
    if rules[_PROBABILITY] == 1 or not (dy.numel() and k.numel()):
        return tuple(gradient.zero_() for gradient in gradients)
    lse = lse.contiguous()  # the kernels do not read its strides, which a hook of saved tensors may change
    dq, dk, dv, dbias, dsinks = gradients
    bias, sinks = rules[:2]
    delta = torch.empty_like(lse)
    backward = _run_backward if in_cpp(q) else launch_backward
    bias_sums = backward(dy, q, k, v, y, lse, delta, dq, dk, dv, wants_bias, *rules)
    if bias_sums is not None:
        dbias = bias_sums.to(bias.dtype)
    if sinks is not None:
        shares = torch.exp2(sinks.float()[:, None] * math.log2(math.e) - lse)
        dsinks = -(shares * delta).sum((0, 2)).to(sinks.dtype)
    return dq, dk, dv, dbias, dsinks


def _run_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    wants_bias: bool,
    *rules: Any,
) -> Tensor | None:
    """As `launch_backward`, by the kernel in C++."""
    (batch, heads, tokens, channels), (_, groups, keys, _) = q.shape, k.shape
    problem, _alive = _problem(q, k, v, *rules)
    dy, y = with_adjacent_channels(dy), with_adjacent_channels(y)
    bias = rules[0] if wants_bias else None
    is_table = bias is not None and bias.dim() == 2
    # Tasks that share a bias would write to the same gradient. Tables are small, so each task has its own.
    tasks = batch * groups
    if bias is not None and not is_table:
        tasks = (1 if bias.shape[0] == 1 else batch) * (1 if bias.shape[1] == 1 else groups)
    most = max(_PARTS, _TASKS // (batch * heads))
    chunks = max(min(-(-_TASKS // tasks), keys // _KEYS_OF_CHUNK, most), 1)
    bias_sums = None
    if bias is not None:
        shape = (chunks * batch, *bias.shape) if is_table else bias.shape
        bias_sums = torch.zeros(shape, dtype=torch.float32, device=q.device)
    parts = dq
    if chunks > 1 or channels % 16 or dq.dtype != torch.float32:
        parts = q.new_empty(chunks * batch, heads, tokens, -(-channels // 16) * 16, dtype=torch.float32)
    run(
        "attention_backward",
        *(ctypes.byref(problem), Heads.of(dy), Heads.of(y), pointer(lse), pointer(delta), Heads.of(parts)),
        *(Heads.of(dq), Heads.of(dk), Heads.of(dv), _heads(bias_sums, tokens), chunks),
    )
    return bias_sums if bias_sums is None or not is_table else bias_sums.sum(0)


class _Problem(ctypes.Structure):
    """`Problem` of cpu/attention.cpp."""

    _fields_ = (
        *((name, Heads) for name in ("q", "k", "v", "bias", "mask", "padding")),
        *((name, ctypes.c_void_p) for name in ("sinks", "documents", "seed")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "groups", "tokens", "keys", "channels", "width")),
        *((name, ctypes.c_int64) for name in ("causal", "window", "first")),
        *((name, ctypes.c_int64) for name in ("first_row", "rows_of_batch", "rows_of_head", "first_column")),
        ("threshold", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap", "keep_scale")),
    )


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    key_padding_mask: Tensor | None,
    mask: Tensor | None,
    documents: Tensor | None,
    seed: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    first: int,
    soft_cap: float | None,
    p: float,
    first_row: int,
    rows_of_batch: int,
    rows_of_head: int,
    first_column: int,
) -> tuple[_Problem, list[Tensor | None]]:
    """Return the arguments of the kernels, and the tensors that must live as long as they do."""
    (batch, heads, tokens, channels), (_, groups, keys, width) = q.shape, v.shape
    q, k, v = map(with_adjacent_channels, (q, k, v))
    bias, mask = (None if x is None else with_adjacent_channels(x) for x in (bias, mask))
    sinks = None if sinks is None else sinks.float().contiguous()
    padding = None if key_padding_mask is None else with_adjacent_channels(key_padding_mask)[:, None, None]
    documents = None if documents is None else documents.to(torch.int64).contiguous()
    threshold, factor = (0, 1.0) if seed is None else mask_numbers(p)
    rows = (first_row, rows_of_batch, rows_of_head) if rows_of_head else (0, heads * tokens, tokens)
    problem = _Problem(
        *(_heads(x, tokens) for x in (q, k, v, bias, mask, padding)),
        *map(pointer, (sinks, documents, seed)),
        *(batch, heads, groups, tokens, keys, channels, width, causal, window or 0, first),
        *(*rows, first_column, threshold, scale, soft_cap or 0.0, factor),
    )
    return problem, [q, k, v, bias, mask, padding, sinks, documents, seed]


def _heads(x: Tensor | None, tokens: int) -> Heads:
    """Return a tensor [B|1, H|1, T|1, N] as the kernels take it, with stride 0 where a size is 1.

    A table of distances, [H, T + S - 1] or [B, H, T + S - 1], becomes a bias whose rows begin at T - 1, T - 2, ... 0.
    """
    if x is None:
        return Heads()
    if x.dim() < 4:
        data = x.data_ptr() + (tokens - 1) * x.element_size()
        return Heads(data, x.stride(0) if x.dim() == 3 else 0, x.stride(-2), -1, TYPES[x.dtype])
    strides = (stride if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
    return Heads(x.data_ptr(), *strides, 0 if x.dtype == torch.bool else TYPES[x.dtype])


def _empty_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, tokens = q.shape[:3]
    y = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)
    return y, q.new_empty(batch, heads, tokens, dtype=torch.float32)


def _empty_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, bias: Tensor | None, sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    dbias = q.new_empty(0) if bias is None or not rest[-1] else bias.new_empty(bias.shape)
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return *map(_empty_heads, (q, k, v)), dbias, dsinks


def _empty_heads(x: Tensor) -> Tensor:
    """Return an empty gradient in the order of heads and tokens that x has in memory."""
    if x.stride(1) < x.stride(2):
        return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)
    return x.new_empty(x.shape)


attention_forward = define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)", _launch_forward, _empty_forward
)
attention_backward = define(
    f"attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, {_OPTIONS}, bool wants_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    _empty_backward,
)


# As torch counts its own attention: hidden keys too.
@register_flop_formula(torch.ops.fuselayers.attention_forward)
def _forward_flops(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **unread: Any) -> int:
    batch, heads, tokens, channels = q
    return 2 * batch * heads * tokens * k[2] * (channels + v[3])


@register_flop_formula(torch.ops.fuselayers.attention_backward)
def _backward_flops(dy: Any, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **unread: Any) -> int:
    batch, heads, tokens, channels = q
    return 2 * batch * heads * tokens * k[2] * (3 * channels + 2 * v[3])
