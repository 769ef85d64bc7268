"""The Triton kernels of attention. `registered` calls them with the tensors and numbers that it documents.

A program of the forward kernel has a tile of queries and loops over the keys that a causal rule or a window allows
them. Backward has three kernels, so that each gradient is summed in a fixed order, without atomics:

    dq and delta   a tile of queries, loops over keys; delta = sum(dy y) of a query
    dk and dv      a tile of keys, loops over the query heads that share it, and over queries
    dbias          a tile of the bias, loops over the batches, heads and queries that share it

Each computes the weights again: exp2 of the score minus the logarithm of the denominator that forward stored. On a GPU
no kernel stores a tensor of [T, S], but for the gradient of a bias, also where this is then summed to one of distances.

Dao, "FlashAttention-2", 2023, sections 3.1 and 3.2.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..implementations.launch import INTERPRETED, ON_AMD, kernel, launch, shared_memory
from ..implementations.triton_language import tile_function, tl
from ..philox import keep_tile, mask_numbers
from ..rows import cdiv, next_power_of_2, vector_of

__all__ = ["launch_backward", "launch_forward", "why_too_wide"]

_LEAST: Final = 16  # rows and columns of the smallest matrix instruction
_SMALL_TILE: Final = 32  # queries, and keys


class _Tiles(NamedTuple):
    """Queries and keys of a tile, and the warps of a program."""

    queries: int
    keys: int
    warps: int


def launch_forward(q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *rules: Any) -> None:
    """Fill y and lse."""
    call = _Call((q, k, v), rules, written=(y,))
    tiles = _tiles(call, forward=True)
    grid = (cdiv(call.tokens, tiles.queries) * call.batch * call.heads,)
    arguments = *call.tensors, y, lse, *call.strides(y), *call.numbers
    launch(_forward_kernel, grid, arguments, call.constants(tiles), num_warps=tiles.warps)


def launch_backward(
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
    """Fill delta and the gradients of q, k and v; return that of the bias, in float32, if it is wanted."""
    dy, y = with_adjacent_channels(dy), with_adjacent_channels(y)
    call = _Call((q, k, v), rules, written=(dy, y, dq, dk, dv))
    tiles = _tiles(call, forward=False)
    read = *call.tensors, dy, lse, delta, *call.strides(dy)
    constants = call.constants(tiles)
    grid = (cdiv(call.tokens, tiles.queries) * call.batch * call.heads,)
    arguments = *read, y, dq, *call.strides(y), *call.strides(dq), *call.numbers
    launch(_backward_of_queries_kernel, grid, arguments, constants, num_warps=tiles.warps)
    grid = (cdiv(call.keys, tiles.keys) * call.batch * call.groups,)
    arguments = *read, dk, dv, *call.strides(dk), *call.strides(dv), *call.numbers
    launch(_backward_of_keys_kernel, grid, arguments, constants, num_warps=tiles.warps)
    if not wants_bias:
        return None
    bias = rules[0]
    shape = bias.shape if bias.dim() == 4 else (1, call.heads, call.tokens, call.keys)
    dbias = torch.zeros(shape, dtype=torch.float32, device=q.device)
    shared = tuple(size if own == 1 else 1 for own, size in zip(shape, (call.batch, call.heads), strict=False))
    rows = 1 if shape[2] == 1 else cdiv(call.tokens, tiles.queries)
    grid = (rows * cdiv(call.keys, tiles.keys) * shape[0] * shape[1],)
    arguments = *read, dbias, *dbias.stride()[:3], *shape[:3], *shared, *call.numbers
    launch(_backward_of_bias_kernel, grid, arguments, constants, num_warps=tiles.warps)
    if bias.dim() == 4:
        return dbias
    sums: Tensor = torch.ops.aten.unfold_backward(dbias[0].flip(-2), bias.shape, -1, call.keys, 1)
    return sums


class _Call:
    """The arguments that all kernels share.

    Args:
        heads: q, k and v.
        rules: the other arguments, as `registered` documents them.
        written: the other tensors of heads, [B, H, T, N].
    """

    def __init__(self, heads: Sequence[Tensor], rules: Sequence[Any], *, written: Sequence[Tensor]) -> None:
        bias, sinks, padding, mask, documents, seed, *numbers = rules
        scale, causal, window, first, soft_cap, p, first_row, rows_of_batch, rows_of_head, first_column = numbers
        q, k, v = map(with_adjacent_channels, heads)
        bias, mask = (None if x is None else with_adjacent_channels(x) for x in (bias, mask))
        (self.batch, self.heads, self.tokens, self.channels), (_, self.groups, self.keys, self.width) = q.shape, v.shape
        padding, documents, sinks = (None if x is None else x.contiguous() for x in (padding, documents, sinks))
        self.tensors = q, k, v, bias, sinks, padding, mask, documents, seed
        of_heads = q, k, v, *written
        strides = (stride for x in of_heads for stride in x.stride()[:3])
        self._vector = vector_of(self.channels, self.width, *strides)
        of_scores = *_broadcast_strides(bias), *_broadcast_strides(mask)
        scores = vector_of(*of_scores)
        threshold, keep_scale = (0, 1.0) if seed is None else mask_numbers(p)
        rows = (first_row, rows_of_batch, rows_of_head) if rows_of_head else (0, self.heads * self.tokens, self.tokens)
        self.numbers = (
            *(stride for x in (q, k, v) for stride in self.strides(x)),
            *(stride // scores for stride in of_scores),
            *(self.heads, self.groups, self.tokens, self.keys, window or 0, first, scale, soft_cap or 1.0),
            *(*rows, first_column // 8, threshold, keep_scale),
        )
        self.is_wide = q.dtype == torch.float32
        tensor_float = self.is_wide and torch.backends.cuda.matmul.allow_tf32
        # The interpreter multiplies the bits of bfloat16. On a GPU the factors of products stay in 16 bits.
        products = self.is_wide or INTERPRETED, self._vector, scores, "tf32" if tensor_float else "ieee"
        self._flags = causal, window is not None, soft_cap is not None, *products

    def strides(self, x: Tensor) -> tuple[int, ...]:
        """Return the strides of batch, head and row over VECTOR."""
        return tuple(stride // self._vector for stride in x.stride()[:3])

    def constants(self, tiles: _Tiles) -> tuple[Any, ...]:
        sizes = self.channels, self.width
        return *self._flags, *sizes, *map(_padded, sizes), tiles.queries, tiles.keys


def _tiles(call: _Call, *, forward: bool) -> _Tiles:
    # Chosen so that few registers spill in compiled code; not measured on a GPU.
    q, _, _, bias, *_ = call.tensors
    widest = _padded(max(call.channels, call.width))
    if forward:
        queries, keys, warps = 128, 64, 8
    else:
        queries, keys, warps = 64, 64 if widest <= 64 else 32, 8
    wanted = _wanted(*((queries, keys) if forward else (keys, queries)), widest * q.itemsize, has_bias=bias is not None)
    if widest > 128 or call.is_wide or wanted > _shared_memory(q.device):
        queries, keys, warps = _SMALL_TILE, _SMALL_TILE, 4 if widest <= 64 else 8
    return _Tiles(_at_most(queries, call.tokens), _at_most(keys, call.keys), warps)


def _padded(channels: int) -> int:
    return max(next_power_of_2(channels), _LEAST)


def _wanted(outer: int, inner: int, row: int, *, has_bias: bool) -> int:
    """Return bytes that are enough for the shared memory of a program, with `row` bytes of a head in each row.

    A program holds an outer tile, and Triton's pipeline loads three pairs of inner tiles ahead. No kernel takes more,
    as compiled for sm_90.
    """
    return row * (outer + 6 * inner) + outer * inner * (12 if has_bias else 2)


def _shared_memory(device: torch.device) -> int:
    # On AMD the pipeline has one stage of three: compiled for gfx942, a tile fits where a third of `_wanted` does.
    return shared_memory(device) * (3 if ON_AMD else 1)


def why_too_wide(q: Tensor, v: Tensor) -> str | None:
    """Return why the kernels' smallest tiles do not fit in shared memory, or None if they do."""
    most_bytes = (_shared_memory(q.device) - 2 * _SMALL_TILE**2) // (7 * _SMALL_TILE)  # a row's, by `_wanted`
    most = 1 << (most_bytes // q.dtype.itemsize).bit_length() - 1  # a tile has a power of two
    if q.shape[-1] <= most and v.shape[-1] <= most:
        return None
    return f"its heads have more than the {most} channels that fit in this GPU's shared memory in {q.dtype}"


def _at_most(tile: int, size: int) -> int:
    return max(min(tile, next_power_of_2(size)), _LEAST)


def with_adjacent_channels(x: Tensor) -> Tensor:
    """Return x, or a copy whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides of batch, head and query, 0 where a size is 1; a query of a table of distances has -1."""
    if x is None:
        return 0, 0, 0
    if x.dim() == 2:
        return 0, x.stride(0), -1
    return tuple(stride if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))


@tile_function
def _heads_tile(  # type: ignore[no-untyped-def]
    x_ptr,
    batch, head, rows, num_rows, stride_of_batch, stride_of_head, stride_of_row,
    WIDE: tl.constexpr, VECTOR: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Load rows of a head, [rows, BLOCK_CHANNELS]; beyond the tensor they are 0. Batch and head are int64."""
    channels = tl.arange(0, BLOCK_CHANNELS)
    start = x_ptr + (batch * stride_of_batch + head * stride_of_head) * VECTOR
    live = (rows < num_rows)[:, None] & (channels < CHANNELS)[None, :]
    x = tl.load(start + rows.to(tl.int64)[:, None] * stride_of_row * VECTOR + channels[None, :], mask=live, other=0.0)
    return x.to(tl.float32) if WIDE else x


@tile_function
def _store_heads_tile(  # type: ignore[no-untyped-def]
    x,
    x_ptr,
    batch, head, rows, num_rows, stride_of_batch, stride_of_head, stride_of_row,
    VECTOR: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    channels = tl.arange(0, BLOCK_CHANNELS)
    start = x_ptr + (batch * stride_of_batch + head * stride_of_head) * VECTOR
    live = (rows < num_rows)[:, None] & (channels < CHANNELS)[None, :]
    x = x.to(x_ptr.dtype.element_ty)
    tl.store(start + rows.to(tl.int64)[:, None] * stride_of_row * VECTOR + channels[None, :], x, mask=live)


@tile_function
def _tanh_tile(x):  # type: ignore[no-untyped-def]
    # The quotient loses the digits of a small x, for which the series is exact to float32.
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(square < 0.04, series, 1 - 2 / (1 + tl.exp2(2 * 1.4426950408889634 * x)))


@tile_function
def _scores_tile(  # type: ignore[no-untyped-def]
    q, k,
    bias_ptr, padding_ptr, mask_ptr, documents_ptr,
    batch, head, queries, keys,
    bias_batch, bias_head, bias_query, mask_batch, mask_head, mask_query,
    num_queries, num_keys, window, first, scale, soft_cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SCORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores times log2(e), -inf where a query may not look at a key, and the derivative of the cap."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    slope = tl.full(score.shape, 1.0, tl.float32)
    if CAP:
        bounded = _tanh_tile(score / soft_cap)
        score = soft_cap * bounded
        slope = 1 - bounded * bounded
    live = (queries < num_queries)[:, None] & (keys < num_keys)[None, :]
    visible = live
    gap = first + queries[:, None] - keys[None, :]
    if CAUSAL:
        visible = visible & (gap >= 0)
    if WINDOW:
        visible = visible & (gap < window)
        if not CAUSAL:
            visible = visible & (gap > -window)
    wide_queries = queries.to(tl.int64)[:, None]
    if bias_ptr is not None:
        # In a table of distances the row of the first query is the last.
        row = tl.where(bias_query < 0, num_queries - 1, 0)
        start = bias_ptr + (batch * bias_batch + head * bias_head + row) * SCORES
        score += tl.load(start + wide_queries * bias_query * SCORES + keys[None, :], mask=live, other=0.0).to(
            tl.float32
        )
        # LOWEST of cpu/attention.cpp, before the factor log2(e).
        score = tl.where((score < -90852.18) & (score != float("-inf")), -90852.18, score)
    if mask_ptr is not None:
        start = mask_ptr + (batch * mask_batch + head * mask_head) * SCORES
        allowed = tl.load(start + wide_queries * mask_query * SCORES + keys[None, :], mask=live, other=0)
        visible = visible & (allowed != 0)
    of_batch = batch * num_keys
    if padding_ptr is not None:
        real = tl.load(padding_ptr + of_batch + keys, mask=keys < num_keys, other=0)
        visible = visible & (real != 0)[None, :]
    if documents_ptr is not None:
        of_queries = tl.load(documents_ptr + of_batch + first + queries, mask=queries < num_queries, other=-1)
        of_keys = tl.load(documents_ptr + of_batch + keys, mask=keys < num_keys, other=-2)
        visible = visible & (of_queries[:, None] == of_keys[None, :])
    # The lowest score times log2(e) would be -inf, which must not hide a key.
    visible = visible & (score != float("-inf"))
    score *= 1.4426950408889634
    score = tl.where(score == float("-inf"), -3.4028234663852886e38, score)
    return tl.where(visible, score, float("-inf")), slope


@tile_function
def _first_and_last_key(  # type: ignore[no-untyped-def]
    first_query, num_keys, window, first,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Return the range of keys that a tile of queries may look at; it begins at a tile."""
    lowest = 0
    end = num_keys
    if WINDOW:
        lowest = tl.maximum(first + first_query - window + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
        end = tl.minimum(end, first + first_query + BLOCK_QUERIES - 1 + window)
    if CAUSAL:
        end = tl.minimum(end, first + first_query + BLOCK_QUERIES)
    return lowest, end


@tile_function
def _first_and_last_query(  # type: ignore[no-untyped-def]
    first_key, num_queries, window, first,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Return the range of queries that may look at a tile of keys; it begins at a tile."""
    lowest = 0
    end = num_queries
    if WINDOW:
        end = tl.minimum(end, first_key + BLOCK_KEYS - 1 + window - first)
        if not CAUSAL:
            lowest = tl.maximum(first_key - window + 1 - first, 0) // BLOCK_QUERIES * BLOCK_QUERIES
    if CAUSAL:
        lowest = tl.maximum(first_key - first, 0) // BLOCK_QUERIES * BLOCK_QUERIES
    return lowest, end


@kernel
def _forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, bias_ptr, sinks_ptr, padding_ptr, mask_ptr, documents_ptr, seed_ptr, y_ptr, lse_ptr,
    y_batch, y_head, y_query, q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, bias_batch,
    bias_head, bias_query, mask_batch, mask_head, mask_query,
    num_heads, num_groups, num_queries, num_keys, window, first, scale, soft_cap, first_row, rows_of_batch,
    rows_of_head, first_group, threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
    SCORES: tl.constexpr, PRECISION: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(num_queries, BLOCK_QUERIES)
    first_query = tl.program_id(0) % tiles * BLOCK_QUERIES
    batch = tl.program_id(0).to(tl.int64) // tiles // num_heads
    head = tl.program_id(0).to(tl.int64) // tiles % num_heads
    group = head // (num_heads // num_groups)
    queries = first_query + tl.arange(0, BLOCK_QUERIES)
    q = _heads_tile(
        q_ptr, batch, head, queries, num_queries, q_batch, q_head, q_query, WIDE, VECTOR, CHANNELS, BLOCK_CHANNELS
    )
    largest = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    if sinks_ptr is not None:
        largest = tl.zeros((BLOCK_QUERIES,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total += tl.where(largest == float("-inf"), 0.0, 1.0)
    y = tl.zeros((BLOCK_QUERIES, BLOCK_WIDTH), tl.float32)
    row = first_row + batch * rows_of_batch + head * rows_of_head + queries
    lowest, end = _first_and_last_key(first_query, num_keys, window, first, CAUSAL, WINDOW, BLOCK_QUERIES, BLOCK_KEYS)
    for first_key in range(lowest, end, BLOCK_KEYS):
        keys = first_key + tl.arange(0, BLOCK_KEYS)
        k = _heads_tile(
            k_ptr, batch, group, keys, num_keys, k_batch, k_head, k_key, WIDE, VECTOR, CHANNELS, BLOCK_CHANNELS
        )
        score, _ = _scores_tile(
            q, k, bias_ptr, padding_ptr, mask_ptr, documents_ptr, batch, head, queries, keys,
            bias_batch, bias_head, bias_query, mask_batch, mask_head, mask_query,
            num_queries, num_keys, window, first, scale, soft_cap, CAUSAL, WINDOW, CAP, SCORES, PRECISION,
        )  # fmt: skip
        largest_now = tl.maximum(largest, tl.max(score, 1))
        # Without an allowed key so far the largest score is -inf, and -inf - -inf would be NaN.
        base = tl.where(largest_now == float("-inf"), 0.0, largest_now)
        weight = tl.exp2(score - base[:, None])
        change = tl.exp2(largest - base)
        total = total * change + tl.sum(weight, 1)
        largest = largest_now
        if seed_ptr is not None:
            keep = keep_tile(
                seed_ptr, None, first_group, row, num_queries, first_key, threshold, BLOCK_QUERIES, BLOCK_KEYS
            )
            weight = tl.where(keep, weight * keep_scale, 0.0)
        v = _heads_tile(v_ptr, batch, group, keys, num_keys, v_batch, v_head, v_key, WIDE, VECTOR, WIDTH, BLOCK_WIDTH)
        y = y * change[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    is_empty = total == 0
    y = y / tl.where(is_empty, 1.0, total)[:, None]
    _store_heads_tile(y, y_ptr, batch, head, queries, num_queries, y_batch, y_head, y_query, VECTOR, WIDTH, BLOCK_WIDTH)
    lse = tl.where(is_empty, float("inf"), largest + tl.log2(tl.where(is_empty, 1.0, total)))
    of_head = (batch * num_heads + head) * num_queries
    tl.store(lse_ptr + of_head + queries, lse, mask=queries < num_queries)


@kernel
def _backward_of_queries_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, bias_ptr, sinks_ptr, padding_ptr, mask_ptr, documents_ptr, seed_ptr, dy_ptr, lse_ptr,
    delta_ptr,
    dy_batch, dy_head, dy_query,
    y_ptr, dq_ptr,
    y_batch, y_head, y_query, dq_batch, dq_head, dq_query, q_batch, q_head, q_query, k_batch, k_head, k_key,
    v_batch, v_head, v_key, bias_batch, bias_head, bias_query, mask_batch, mask_head, mask_query,
    num_heads, num_groups, num_queries, num_keys, window, first, scale, soft_cap, first_row, rows_of_batch,
    rows_of_head, first_group, threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
    SCORES: tl.constexpr, PRECISION: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(num_queries, BLOCK_QUERIES)
    first_query = tl.program_id(0) % tiles * BLOCK_QUERIES
    batch = tl.program_id(0).to(tl.int64) // tiles // num_heads
    head = tl.program_id(0).to(tl.int64) // tiles % num_heads
    group = head // (num_heads // num_groups)
    queries = first_query + tl.arange(0, BLOCK_QUERIES)
    q = _heads_tile(
        q_ptr, batch, head, queries, num_queries, q_batch, q_head, q_query, WIDE, VECTOR, CHANNELS, BLOCK_CHANNELS
    )
    y = _heads_tile(
        y_ptr, batch, head, queries, num_queries, y_batch, y_head, y_query, WIDE, VECTOR, WIDTH, BLOCK_WIDTH
    )
    dy = _heads_tile(
        dy_ptr, batch, head, queries, num_queries, dy_batch, dy_head, dy_query, WIDE, VECTOR, WIDTH, BLOCK_WIDTH
    )
    of_head = (batch * num_heads + head) * num_queries
    live = queries < num_queries
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta_ptr + of_head + queries, delta, mask=live)
    lse = tl.load(lse_ptr + of_head + queries, mask=live, other=float("inf"))
    dq = tl.zeros((BLOCK_QUERIES, BLOCK_CHANNELS), tl.float32)
    row = first_row + batch * rows_of_batch + head * rows_of_head + queries
    lowest, end = _first_and_last_key(first_query, num_keys, window, first, CAUSAL, WINDOW, BLOCK_QUERIES, BLOCK_KEYS)
    for first_key in range(lowest, end, BLOCK_KEYS):
        keys = first_key + tl.arange(0, BLOCK_KEYS)
        k = _heads_tile(
            k_ptr, batch, group, keys, num_keys, k_batch, k_head, k_key, WIDE, VECTOR, CHANNELS, BLOCK_CHANNELS
        )
        v = _heads_tile(v_ptr, batch, group, keys, num_keys, v_batch, v_head, v_key, WIDE, VECTOR, WIDTH, BLOCK_WIDTH)
        score, slope = _scores_tile(
            q, k, bias_ptr, padding_ptr, mask_ptr, documents_ptr, batch, head, queries, keys,
            bias_batch, bias_head, bias_query, mask_batch, mask_head, mask_query,
            num_queries, num_keys, window, first, scale, soft_cap, CAUSAL, WINDOW, CAP, SCORES, PRECISION,
        )  # fmt: skip
        weight = tl.exp2(score - lse[:, None])
        dweight = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        if seed_ptr is not None:
            keep = keep_tile(
                seed_ptr, None, first_group, row, num_queries, first_key, threshold, BLOCK_QUERIES, BLOCK_KEYS
            )
            dweight = tl.where(keep, dweight * keep_scale, 0.0)
        dscore = weight * (dweight - delta[:, None]) * slope
        dq += tl.dot(dscore.to(k.dtype), k, input_precision=PRECISION)
    dq *= scale
    _store_heads_tile(
        dq, dq_ptr, batch, head, queries, num_queries, dq_batch, dq_head, dq_query, VECTOR, CHANNELS, BLOCK_CHANNELS
    )


@kernel
def _backward_of_keys_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, bias_ptr, sinks_ptr, padding_ptr, mask_ptr, documents_ptr, seed_ptr, dy_ptr, lse_ptr,
    delta_ptr,
    dy_batch, dy_head, dy_query,
    dk_ptr, dv_ptr,
    dk_batch, dk_head, dk_key, dv_batch, dv_head, dv_key, q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch,
    v_head, v_key, bias_batch, bias_head, bias_query, mask_batch, mask_head, mask_query,
    num_heads, num_groups, num_queries, num_keys, window, first, scale, soft_cap, first_row, rows_of_batch,
    rows_of_head, first_group, threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
    SCORES: tl.constexpr, PRECISION: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(num_keys, BLOCK_KEYS)
    first_key = tl.program_id(0) % tiles * BLOCK_KEYS
    batch = tl.program_id(0).to(tl.int64) // tiles // num_groups
    group = tl.program_id(0).to(tl.int64) // tiles % num_groups
    repeats = num_heads // num_groups
    keys = first_key + tl.arange(0, BLOCK_KEYS)
    k = _heads_tile(k_ptr, batch, group, keys, num_keys, k_batch, k_head, k_key, WIDE, VECTOR, CHANNELS, BLOCK_CHANNELS)
    v = _heads_tile(v_ptr, batch, group, keys, num_keys, v_batch, v_head, v_key, WIDE, VECTOR, WIDTH, BLOCK_WIDTH)
    dk = tl.zeros((BLOCK_KEYS, BLOCK_CHANNELS), tl.float32)
    dv = tl.zeros((BLOCK_KEYS, BLOCK_WIDTH), tl.float32)
    lowest, end = _first_and_last_query(
        first_key, num_queries, window, first, CAUSAL, WINDOW, BLOCK_QUERIES, BLOCK_KEYS
    )
    for number in range(0, repeats):
        head = group * repeats + number
        of_head = (batch * num_heads + head) * num_queries
        for first_query in range(lowest, end, BLOCK_QUERIES):
            queries = first_query + tl.arange(0, BLOCK_QUERIES)
            live = queries < num_queries
            q = _heads_tile(
                q_ptr,
                batch,
                head,
                queries,
                num_queries,
                q_batch,
                q_head,
                q_query,
                WIDE,
                VECTOR,
                CHANNELS,
                BLOCK_CHANNELS,
            )
            dy = _heads_tile(
                dy_ptr, batch, head, queries, num_queries, dy_batch, dy_head, dy_query, WIDE, VECTOR, WIDTH, BLOCK_WIDTH
            )
            lse = tl.load(lse_ptr + of_head + queries, mask=live, other=float("inf"))
            delta = tl.load(delta_ptr + of_head + queries, mask=live, other=0.0)
            score, slope = _scores_tile(
                q, k, bias_ptr, padding_ptr, mask_ptr, documents_ptr, batch, head, queries, keys,
                bias_batch, bias_head, bias_query, mask_batch, mask_head, mask_query,
                num_queries, num_keys, window, first, scale, soft_cap, CAUSAL, WINDOW, CAP, SCORES, PRECISION,
            )  # fmt: skip
            weight = tl.exp2(score - lse[:, None])
            dweight = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
            kept = weight
            if seed_ptr is not None:
                row = first_row + batch * rows_of_batch + head * rows_of_head + queries
                keep = keep_tile(
                    seed_ptr, None, first_group, row, num_queries, first_key, threshold, BLOCK_QUERIES, BLOCK_KEYS
                )
                dweight = tl.where(keep, dweight * keep_scale, 0.0)
                kept = tl.where(keep, weight * keep_scale, 0.0)
            dv += tl.dot(tl.trans(kept.to(dy.dtype)), dy, input_precision=PRECISION)
            dscore = weight * (dweight - delta[:, None]) * slope
            dk += tl.dot(tl.trans(dscore.to(q.dtype)), q, input_precision=PRECISION)
    dk *= scale
    _store_heads_tile(
        dk, dk_ptr, batch, group, keys, num_keys, dk_batch, dk_head, dk_key, VECTOR, CHANNELS, BLOCK_CHANNELS
    )
    _store_heads_tile(dv, dv_ptr, batch, group, keys, num_keys, dv_batch, dv_head, dv_key, VECTOR, WIDTH, BLOCK_WIDTH)


@kernel
def _backward_of_bias_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, bias_ptr, sinks_ptr, padding_ptr, mask_ptr, documents_ptr, seed_ptr, dy_ptr, lse_ptr,
    delta_ptr,
    dy_batch, dy_head, dy_query,
    dbias_ptr,
    dbias_batch, dbias_head, dbias_query,
    batches_of_bias, heads_of_bias, queries_of_bias, batches_that_share, heads_that_share,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, bias_batch, bias_head, bias_query,
    mask_batch, mask_head, mask_query,
    num_heads, num_groups, num_queries, num_keys, window, first, scale, soft_cap, first_row, rows_of_batch,
    rows_of_head, first_group, threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
    SCORES: tl.constexpr, PRECISION: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(num_keys, BLOCK_KEYS)
    first_key = tl.program_id(0) % tiles * BLOCK_KEYS
    program = tl.program_id(0).to(tl.int64) // tiles
    head_of_bias = program % heads_of_bias
    batch_of_bias = program // heads_of_bias % batches_of_bias
    tile_of_queries = program // heads_of_bias // batches_of_bias
    keys = first_key + tl.arange(0, BLOCK_KEYS)
    start = (tile_of_queries * BLOCK_QUERIES).to(tl.int32)
    end = tl.where(queries_of_bias == 1, num_queries, start + BLOCK_QUERIES)
    dbias = tl.zeros((BLOCK_QUERIES, BLOCK_KEYS), tl.float32)
    for number in range(0, batches_that_share * heads_that_share):
        batch = batch_of_bias + number // heads_that_share
        head = head_of_bias + number % heads_that_share
        group = head // (num_heads // num_groups)
        of_head = (batch * num_heads + head) * num_queries
        k = _heads_tile(
            k_ptr, batch, group, keys, num_keys, k_batch, k_head, k_key, WIDE, VECTOR, CHANNELS, BLOCK_CHANNELS
        )
        v = _heads_tile(v_ptr, batch, group, keys, num_keys, v_batch, v_head, v_key, WIDE, VECTOR, WIDTH, BLOCK_WIDTH)
        for first_query in range(start, end, BLOCK_QUERIES):
            queries = first_query + tl.arange(0, BLOCK_QUERIES)
            live = queries < num_queries
            q = _heads_tile(
                q_ptr,
                batch,
                head,
                queries,
                num_queries,
                q_batch,
                q_head,
                q_query,
                WIDE,
                VECTOR,
                CHANNELS,
                BLOCK_CHANNELS,
            )
            dy = _heads_tile(
                dy_ptr, batch, head, queries, num_queries, dy_batch, dy_head, dy_query, WIDE, VECTOR, WIDTH, BLOCK_WIDTH
            )
            lse = tl.load(lse_ptr + of_head + queries, mask=live, other=float("inf"))
            delta = tl.load(delta_ptr + of_head + queries, mask=live, other=0.0)
            score, _ = _scores_tile(
                q, k, bias_ptr, padding_ptr, mask_ptr, documents_ptr, batch, head, queries, keys,
                bias_batch, bias_head, bias_query, mask_batch, mask_head, mask_query,
                num_queries, num_keys, window, first, scale, soft_cap, CAUSAL, WINDOW, CAP, SCORES, PRECISION,
            )  # fmt: skip
            dweight = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
            if seed_ptr is not None:
                row = first_row + batch * rows_of_batch + head * rows_of_head + queries
                keep = keep_tile(
                    seed_ptr, None, first_group, row, num_queries, first_key, threshold, BLOCK_QUERIES, BLOCK_KEYS
                )
                dweight = tl.where(keep, dweight * keep_scale, 0.0)
            dbias += tl.exp2(score - lse[:, None]) * (dweight - delta[:, None])
    begin = dbias_ptr + batch_of_bias * dbias_batch + head_of_bias * dbias_head
    if queries_of_bias == 1:
        tl.store(begin + keys, tl.sum(dbias, 0), mask=keys < num_keys)
    else:
        queries = start + tl.arange(0, BLOCK_QUERIES)
        live = (queries < num_queries)[:, None] & (keys < num_keys)[None, :]
        tl.store(begin + queries.to(tl.int64)[:, None] * dbias_query + keys[None, :], dbias, mask=live)
