"""The forward kernels of softmax and log_softmax; `formula` has the formula and the bytes moved."""

from typing import Final

import torch
from torch import Tensor

from ..implementations import define
from ..implementations.launch import kernel, launch
from ..implementations.triton_language import libdevice, tile_function, tl
from ..rows import as_rows, cdiv, tile_of_rows, vector_of
from .formula import softmax_formula

_MASK_LEVELS: Final = 3


def _launch_forward(scores: Tensor, mask: Tensor | None, causal: bool, scale: float, log: bool = False) -> Tensor:
    y = _empty_result(scores, mask, causal, scale, log)
    if not y.numel():
        return y
    scores_RN = as_rows(scores)
    vector = vector_of(scores_RN.shape[1], scores_RN.stride(0))
    sizes, strides, column_stride = (1, 1), (0, 0, 0), 0
    additive = mask is not None and mask.dtype != torch.bool
    if mask is not None:
        mask, sizes, strides, column_stride = _mask_levels(mask, scores.shape)
    mask_vector = vector if column_stride == 1 and all(stride % vector == 0 for stride in strides) else 1
    split, block_rows, block_columns, num_warps = tile_of_rows(*scores_RN.shape)
    launch(
        _forward_split_kernel if split else _forward_kernel,
        (cdiv(scores_RN.shape[0], block_rows),),
        (
            *(scores_RN, mask, y),
            *(scores_RN.shape[0], scores_RN.shape[1] // vector, scores_RN.stride(0) // vector),
            *(scores.shape[-2] if causal else 1, *sizes, *(stride // mask_vector for stride in strides)),
            *(column_stride, float(scale)),
        ),
        (log, causal, additive, column_stride == 1, mask_vector, vector, block_rows, block_columns),
        num_warps=num_warps,
    )
    return y


def _empty_result(scores: Tensor, mask: Tensor | None, causal: bool, scale: float, log: bool = False) -> Tensor:
    return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)


def _mask_levels(mask: Tensor, shape: torch.Size) -> tuple[Tensor, tuple[int, int], tuple[int, int, int], int]:
    """Return the mask, and the sizes and strides by which the kernels find its rows.

    The leading dimensions, broadcast to `shape`, become three: adjacent dimensions with one common stride (0 for a
    broadcast one) are merged. Returned are the sizes of the second and third, the strides of all three, and the stride
    of the columns.
    """
    leading = mask.expand(shape).stride()[:-1]
    levels: list[tuple[int, int]] = []
    for size, stride in zip(reversed(shape[:-1]), reversed(leading), strict=True):
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = levels[-1][0] * size, levels[-1][1]
        elif size > 1:
            levels.append((size, stride))
    if len(levels) > _MASK_LEVELS:
        return _mask_levels(mask.expand(*shape[:-1], mask.shape[-1]).contiguous(), shape)
    inner, middle, outer = (levels + [(1, 0)] * _MASK_LEVELS)[:_MASK_LEVELS]
    strides = outer[1], middle[1], inner[1]
    return mask, (middle[0], inner[0]), strides, mask.expand(shape).stride(-1)


@tile_function
def loaded_tile(columns, last, live, CAUSAL: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the loaded part of a tile: up to each row's last column, rounded up to whole vectors."""
    loaded = live
    if CAUSAL:
        loaded = loaded & ((columns // VECTOR)[None, :] <= (last // VECTOR)[:, None])
    return loaded


@tile_function
def _seen_tile(  # type: ignore[no-untyped-def]
    scores,
    mask_ptr,
    rows,
    columns,
    last,
    loaded,
    num_middle,
    num_inner,
    outer_stride,
    middle_stride,
    inner_stride,
    column_stride,
    scale,
    CAUSAL: tl.constexpr,
    ADDITIVE: tl.constexpr,
    ADJACENT: tl.constexpr,
    MASK_VECTOR: tl.constexpr,
):
    """Return a tile of scale * scores, with an additive mask added, and which part of it is visible."""
    z = scores.to(tl.float32) * scale
    visible = loaded
    if CAUSAL:
        visible = visible & (columns[None, :] <= last[:, None])
    if mask_ptr is not None:
        above = rows // num_inner
        inner = (rows % num_inner).to(tl.int64) * inner_stride
        middle = (above % num_middle).to(tl.int64) * middle_stride
        outer = (above // num_middle).to(tl.int64) * outer_stride
        row = (outer + middle + inner) * MASK_VECTOR
        if ADJACENT:
            offset = row[:, None] + columns[None, :]
        else:
            offset = row[:, None] + (columns.to(tl.int64) * column_stride)[None, :]
        if ADDITIVE:
            added = tl.load(mask_ptr + offset, mask=loaded, other=0.0).to(tl.float32)
            visible = visible & (added != float("-inf"))
            z += added
        else:
            visible = visible & tl.load(mask_ptr + offset, mask=loaded, other=0)
    return z, visible


@kernel
def _forward_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,
    mask_ptr,
    y_ptr,
    num_rows,
    num_columns,
    scores_stride,
    num_queries,
    num_middle,
    num_inner,
    outer_stride,
    middle_stride,
    inner_stride,
    column_stride,
    scale,
    LOG: tl.constexpr,
    CAUSAL: tl.constexpr,
    ADDITIVE: tl.constexpr,
    ADJACENT: tl.constexpr,
    MASK_VECTOR: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    width = num_columns * VECTOR
    live = (rows < num_rows)[:, None] & (columns < width)[None, :]
    last = rows % num_queries
    loaded = loaded_tile(columns, last, live, CAUSAL, VECTOR)
    row = rows.to(tl.int64)[:, None]
    scores = tl.load(scores_ptr + row * scores_stride * VECTOR + columns[None, :], mask=loaded, other=0.0)
    z, visible = _seen_tile(
        *(scores, mask_ptr, rows, columns, last, loaded, num_middle, num_inner, outer_stride, middle_stride),
        *(inner_stride, column_stride, scale, CAUSAL, ADDITIVE, ADJACENT, MASK_VECTOR),
    )
    z = tl.where(visible, z, float("-inf"))
    z -= tl.max(z, 1)[:, None]
    e = libdevice.fast_expf(z)
    if LOG:
        y = tl.where(visible, z - tl.log(tl.sum(e, 1))[:, None], float("-inf"))
    else:
        y = tl.where(visible, e * (1.0 / tl.sum(e, 1))[:, None], 0.0)
    tl.store(y_ptr + row * width + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=live)


@kernel
def _forward_split_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,
    mask_ptr,
    y_ptr,
    num_rows,
    num_columns,
    scores_stride,
    num_queries,
    num_middle,
    num_inner,
    outer_stride,
    middle_stride,
    inner_stride,
    column_stride,
    scale,
    LOG: tl.constexpr,
    CAUSAL: tl.constexpr,
    ADDITIVE: tl.constexpr,
    ADJACENT: tl.constexpr,
    MASK_VECTOR: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) + tl.arange(0, BLOCK_ROWS)
    row = rows.to(tl.int64)[:, None]
    last = rows % num_queries
    width = num_columns * VECTOR
    end = width
    if CAUSAL:
        end = tl.minimum(width, tl.program_id(0) % num_queries + 1)
    scores_row = scores_ptr + row * scores_stride * VECTOR
    # Each lane has its own maximum and sum. The maximum starts at the lowest finite number: -inf would give NaN in a
    # lane without visible positions.
    largest = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), -3.4028234663852886e38, tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in tl.range(0, end, BLOCK_COLUMNS, num_stages=2):
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        loaded = loaded_tile(columns, last, (columns < width)[None, :], CAUSAL, VECTOR)
        scores = tl.load(scores_row + columns[None, :], mask=loaded, other=0.0)
        z, visible = _seen_tile(
            *(scores, mask_ptr, rows, columns, last, loaded, num_middle, num_inner, outer_stride, middle_stride),
            *(inner_stride, column_stride, scale, CAUSAL, ADDITIVE, ADJACENT, MASK_VECTOR),
        )
        z = tl.where(visible, z, float("-inf"))
        # One of exp(largest - new) and exp(z - new) is exp(0).
        less = libdevice.fast_expf(-tl.abs(z - largest))
        total = tl.where(z > largest, total * less + 1.0, total + less)
        largest = tl.where(z > largest, z, largest)
    most = tl.max(largest, 1)[:, None]
    total_row = tl.sum(total * libdevice.fast_expf(largest - most), 1)[:, None]
    inverse = 1.0 / total_row
    log_total = tl.log(total_row)
    for first in tl.range(0, width, BLOCK_COLUMNS, num_stages=2):
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        live = (columns < width)[None, :]
        loaded = loaded_tile(columns, last, live, CAUSAL, VECTOR)
        scores = tl.load(scores_row + columns[None, :], mask=loaded, other=0.0)
        z, visible = _seen_tile(
            *(scores, mask_ptr, rows, columns, last, loaded, num_middle, num_inner, outer_stride, middle_stride),
            *(inner_stride, column_stride, scale, CAUSAL, ADDITIVE, ADJACENT, MASK_VECTOR),
        )
        if LOG:
            y = tl.where(visible, z - most - log_total, float("-inf"))
        else:
            y = tl.where(visible, libdevice.fast_expf(z - most) * inverse, 0.0)
        tl.store(y_ptr + row * width + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=live)


softmax_forward = define(
    "softmax(Tensor scores, Tensor? mask, bool causal, float scale, bool log=False) -> Tensor",
    _launch_forward,
    _empty_result,
    formula=softmax_formula,
)
