"""The forward kernels of the norm ops; `formula` has the formula and the bytes moved."""

from typing import Any

import torch
from torch import Tensor

from ..cpu import pointer, rows, run, vector
from ..implementations import define, in_cpp
from ..implementations.launch import kernel, launch
from ..implementations.triton_language import tile_function, tl
from ..philox import keep_tile, mask_numbers
from ..rows import as_rows, cdiv, tile_of_rows, vector_of
from .formula import s_is_x


def _launch_forward(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    seed: Tensor | None,
    row_R: Tensor | None,
    p: float,
    eps: float,
    pre: bool,
    rms: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = y, s, mean, rstd = _empty_results(x, residual, bias, weight, norm_bias, seed, row_R, p, eps, pre, rms)
    if not y.numel():
        return results
    s_dtype = x.dtype if not s.numel() else s.dtype
    if in_cpp(x):
        vectors = [vector(in_dtype(row, s_dtype)) for row in (bias, weight, norm_bias)]
        run(
            "norm_forward",
            *(rows(x), rows(residual), *map(pointer, vectors), rows(y), rows(s if s.numel() else None)),
            *(None if rms else pointer(mean), pointer(rstd), pointer(seed), pointer(row_R), *mask_numbers(p)),
            *(eps, pre, rms, y.numel() // y.shape[-1], y.shape[-1]),
        )
        return results
    x_RN = as_rows(x)
    residual_RN = None if residual is None else as_rows(residual)
    residual_stride = 0 if residual_RN is None else residual_RN.stride(0)
    lanes = vector_of(x_RN.shape[1], x_RN.stride(0), residual_stride)
    block_rows, block_columns, num_warps = tile_of_rows(*x_RN.shape)
    num_tiles = cdiv(x_RN.shape[0], block_rows)
    arguments = (
        *(x_RN, residual_RN, *(in_dtype(row, s_dtype) for row in (bias, weight, norm_bias)), seed, row_R),
        *(y, s if s.numel() else None, None if rms else mean, rstd),
        *(x_RN.shape[0], x_RN.shape[1] // lanes, x_RN.stride(0) // lanes),
        *(residual_stride // lanes, *mask_numbers(p), eps),
    )
    constants = pre, rms, lanes, block_rows, block_columns
    launch(_forward_kernel, (num_tiles,), arguments, constants, num_warps=num_warps, persistent_warps=64)
    return results


def in_dtype(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a weight or bias in the dtype and layout that the kernels read."""
    if vector is None or (vector.dtype is dtype and vector.is_contiguous()):
        return vector
    return vector.to(dtype).contiguous()


def _empty_results(
    x: Tensor, residual: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, seed, _, _, _, pre, rms = rest
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    y_dtype = dtype if residual is None else torch.promote_types(dtype, residual.dtype)
    s_dtype = dtype if pre else y_dtype
    no_s = s_is_x(residual, bias, seed, pre)
    s = torch.empty((0,) if no_s else x.shape, dtype=s_dtype, device=x.device)
    num_rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    wide = torch.promote_types(s_dtype, torch.float32)
    mean = torch.empty(0 if rms else num_rows, dtype=wide, device=x.device)
    rstd = torch.empty(num_rows, dtype=wide, device=x.device)
    return torch.empty(x.shape, dtype=y_dtype, device=x.device), s, mean, rstd


@tile_function
def _centred(s, live, width, eps, RMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the centred tile, 0 where masked; the means, and 1 / sqrt(mean square + eps): [R, 1]."""
    mean = tl.zeros((s.shape[0], 1), tl.float32)
    if not RMS:
        mean += tl.sum(tl.where(live, s, 0.0), 1)[:, None] / width
    centred = tl.where(live, s - mean, 0.0)
    return centred, mean, tl.rsqrt(tl.sum(centred * centred, 1)[:, None] / width + eps)


@kernel
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    bias_ptr,
    weight_ptr,
    norm_bias_ptr,
    seed_ptr,
    row_indices_ptr,
    y_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    num_rows,
    num_columns,
    x_stride,
    residual_stride,
    threshold,
    scale,
    eps,
    PRE: tl.constexpr,
    RMS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_COLUMNS)
    width = num_columns * VECTOR
    in_row = columns < width
    weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if norm_bias_ptr is not None:
        norm_bias = tl.load(norm_bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    # Two tiles of longer rows would not fit into shared memory, where the next one is loaded.
    num_stages: tl.constexpr = 2 if BLOCK_COLUMNS <= 8192 else 1
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(0), num_stages=num_stages):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = (rows < num_rows)[:, None] & in_row[None, :]
        row = rows.to(tl.int64)[:, None]
        out = row * width + columns[None, :]
        s = tl.load(x_ptr + row * x_stride * VECTOR + columns[None, :], mask=live, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * residual_stride * VECTOR + columns[None, :], mask=live, other=0.0)
        if bias_ptr is not None:
            s += bias
        if seed_ptr is not None:
            keep = keep_tile(seed_ptr, row_indices_ptr, 0, rows, num_rows, 0, threshold, BLOCK_ROWS, BLOCK_COLUMNS)
            s *= tl.where(keep, scale, 0.0)
        if residual_ptr is not None and not PRE:
            s += residual.to(tl.float32)
        centred, mean, rstd = _centred(s, live, width, eps, RMS)
        y = centred * rstd * weight
        if s_ptr is not None:
            # Note: [two statistics] y comes from s before rounding: in a row of nearly equal values the rounding would
            # be visible. Backward reads the rounded s and needs its statistics: it subtracts nearly equal numbers.
            rounded = s.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + out, rounded, mask=live)
            if s_ptr.dtype.element_ty != tl.float32:
                _, mean, rstd = _centred(rounded.to(tl.float32), live, width, eps, RMS)
        tl.store(rstd_ptr + row, rstd, mask=(rows < num_rows)[:, None])
        if not RMS:
            tl.store(mean_ptr + row, mean, mask=(rows < num_rows)[:, None])
        if norm_bias_ptr is not None:
            y += norm_bias
        if residual_ptr is not None and PRE:
            y += residual.to(tl.float32)
        tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=live)


normalise_forward = define(
    "normalise(Tensor x, Tensor? residual, Tensor? bias, Tensor weight, Tensor? norm_bias, Tensor? seed, "
    "Tensor? row_indices, float p, float eps, bool pre, bool rms) -> (Tensor, Tensor, Tensor, Tensor)",
    _launch_forward,
    _empty_results,
)
