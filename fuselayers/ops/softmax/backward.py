"""The backward kernels of softmax and log_softmax; `formula` has the formula and the bytes moved."""

import torch
from torch import Tensor

from ..implementations import define
from ..implementations.launch import kernel, launch
from ..implementations.triton_language import libdevice, tl
from ..rows import as_rows, cdiv, tile_of_rows, vector_of
from .formula import gradient_formula
from .forward import loaded_tile


def _launch_backward(dy: Tensor, y: Tensor, causal: bool, scale: float, log: bool = False) -> Tensor:
    dscores = _empty_gradient(dy, y, causal, scale, log)
    if not dy.numel():
        return dscores
    dy_RN, y_RN = as_rows(dy), as_rows(y)
    vector = vector_of(y_RN.shape[1], dy_RN.stride(0), y_RN.stride(0))
    split, block_rows, block_columns, num_warps = tile_of_rows(*y_RN.shape)
    launch(
        _backward_split_kernel if split else _backward_kernel,
        (cdiv(y_RN.shape[0], block_rows),),
        (
            *(dy_RN, y_RN, dscores, y_RN.shape[0], y_RN.shape[1] // vector),
            *(dy_RN.stride(0) // vector, y_RN.stride(0) // vector, y.shape[-2] if causal else 1, float(scale)),
        ),
        (log, causal, vector, block_rows, block_columns),
        num_warps=num_warps,
    )
    return dscores


def _empty_gradient(dy: Tensor, y: Tensor, causal: bool, scale: float, log: bool = False) -> Tensor:
    return torch.empty(y.shape, dtype=y.dtype, device=y.device)


@kernel
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr,
    y_ptr,
    dscores_ptr,
    num_rows,
    num_columns,
    dy_stride,
    y_stride,
    num_queries,
    scale,
    LOG: tl.constexpr,
    CAUSAL: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    width = num_columns * VECTOR
    live = (rows < num_rows)[:, None] & (columns < width)[None, :]
    loaded = loaded_tile(columns, rows % num_queries, live, CAUSAL, VECTOR)
    row = rows.to(tl.int64)[:, None]
    dy = tl.load(dy_ptr + row * dy_stride * VECTOR + columns[None, :], mask=loaded, other=0.0).to(tl.float32)
    # Hidden positions contribute nothing, even if their dy is infinite or another position is NaN.
    hidden_y: tl.constexpr = float("-inf") if LOG else 0.0
    y = tl.load(y_ptr + row * y_stride * VECTOR + columns[None, :], mask=loaded, other=hidden_y).to(tl.float32)
    if LOG:
        total = tl.sum(tl.where(y == hidden_y, 0.0, dy), 1)[:, None]
        dscores = tl.where(y == hidden_y, 0.0, scale * (dy - libdevice.fast_expf(y) * total))
    else:
        mean = (tl.sum(tl.where(y == hidden_y, 0.0, dy * y), 1) / tl.sum(y, 1))[:, None]
        dscores = tl.where(y == hidden_y, 0.0, scale * y * (dy - mean))
    tl.store(dscores_ptr + row * width + columns[None, :], dscores.to(dscores_ptr.dtype.element_ty), mask=live)


@kernel
def _backward_split_kernel(  # type: ignore[no-untyped-def]
    dy_ptr,
    y_ptr,
    dscores_ptr,
    num_rows,
    num_columns,
    dy_stride,
    y_stride,
    num_queries,
    scale,
    LOG: tl.constexpr,
    CAUSAL: tl.constexpr,
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
    dy_row = dy_ptr + row * dy_stride * VECTOR
    y_row = y_ptr + row * y_stride * VECTOR
    hidden_y: tl.constexpr = float("-inf") if LOG else 0.0
    products = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    weights = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in tl.range(0, end, BLOCK_COLUMNS, num_stages=2):
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        loaded = loaded_tile(columns, last, (columns < width)[None, :], CAUSAL, VECTOR)
        dy = tl.load(dy_row + columns[None, :], mask=loaded, other=0.0).to(tl.float32)
        y = tl.load(y_row + columns[None, :], mask=loaded, other=hidden_y).to(tl.float32)
        if LOG:
            products += tl.where(y == hidden_y, 0.0, dy)
        else:
            products += tl.where(y == hidden_y, 0.0, dy * y)  # see _backward_kernel
            weights += y
    total = tl.sum(products, 1)[:, None]
    mean = total if LOG else total / tl.sum(weights, 1)[:, None]
    for first in tl.range(0, width, BLOCK_COLUMNS, num_stages=2):
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        live = (columns < width)[None, :]
        loaded = loaded_tile(columns, last, live, CAUSAL, VECTOR)
        dy = tl.load(dy_row + columns[None, :], mask=loaded, other=0.0).to(tl.float32)
        y = tl.load(y_row + columns[None, :], mask=loaded, other=hidden_y).to(tl.float32)
        if LOG:
            dscores = tl.where(y == hidden_y, 0.0, scale * (dy - libdevice.fast_expf(y) * total))
        else:
            dscores = tl.where(y == hidden_y, 0.0, scale * y * (dy - mean))
        tl.store(dscores_ptr + row * width + columns[None, :], dscores.to(dscores_ptr.dtype.element_ty), mask=live)


softmax_backward = define(
    "softmax_backward(Tensor dy, Tensor y, bool causal, float scale, bool log=False) -> Tensor",
    _launch_backward,
    _empty_gradient,
    formula=gradient_formula,
)
