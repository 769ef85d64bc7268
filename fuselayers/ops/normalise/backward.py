"""The backward kernels of the norm ops; `formula` has the formula and the bytes moved."""

from typing import Any

import torch
from torch import Tensor

from ..cpu import pointer, rows, run
from ..implementations import define, in_cpp
from ..implementations.launch import kernel, launch, most_programs
from ..implementations.triton_language import tl
from ..philox import keep_tile, mask_numbers
from ..rows import WARPS_WITH_SUMS, as_rows, cdiv, tile_of_rows, vector_of
from ..sums import sum_partials
from .forward import in_dtype


def _launch_backward(
    dy: Tensor,
    more_dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    row_R: Tensor | None,
    p: float,
    rms: bool,
    wants_norm_bias: bool,
    wants_bias: bool,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    sums_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dresidual, sums_KN = _empty_gradients(
        dy, more_dy, ds, s, wants_norm_bias, wants_bias, x_dtype, residual_dtype, sums_dtype
    )
    if not dy.numel():
        return dx, dresidual, sums_KN.zero_()
    dresidual_or_none = None if residual_dtype is None else dresidual
    if in_cpp(dy):
        dy = dy if more_dy is None else dy + more_dy
        weight = weight.to(s.dtype).float().contiguous()
        wide_KN = sums_KN if sums_KN.dtype == torch.float32 else torch.empty_like(sums_KN, dtype=torch.float32)
        run(
            "norm_backward",
            *(rows(dy), rows(ds), rows(s), pointer(weight), None if rms else pointer(mean), pointer(rstd)),
            *(rows(dx), rows(dresidual_or_none), pointer(wide_KN), pointer(seed), pointer(row_R), *mask_numbers(p)),
            *(rms, wants_norm_bias, wants_bias, s.numel() // s.shape[-1], s.shape[-1]),
        )
        return dx, dresidual, wide_KN.to(sums_KN.dtype)
    dy_RN, s_RN = as_rows(dy), as_rows(s)
    ds_RN = None if ds is None else as_rows(ds)
    more_RN = None if more_dy is None else as_rows(more_dy)
    ds_stride, more_stride = (0 if rows_RN is None else rows_RN.stride(0) for rows_RN in (ds_RN, more_RN))
    vector = vector_of(s_RN.shape[1], dy_RN.stride(0), s_RN.stride(0), ds_stride, more_stride)
    block_rows, block_columns, num_warps = tile_of_rows(*s_RN.shape)
    grid = (cdiv(s_RN.shape[0], block_rows),)
    warps = {"num_warps": num_warps, "persistent_warps": WARPS_WITH_SUMS}
    num_programs = most_programs(grid, dy.device, **warps)
    partial_PKN = torch.empty(num_programs, *sums_KN.shape, dtype=torch.float32, device=dy.device)
    arguments = (
        *(dy_RN, more_RN, ds_RN, s_RN, in_dtype(weight, s.dtype), None if rms else mean, rstd, seed, row_R),
        *(dx, dresidual_or_none, partial_PKN),
        *(s_RN.shape[0], s_RN.shape[1] // vector, dy_RN.stride(0) // vector, more_stride // vector),
        *(ds_stride // vector, s_RN.stride(0) // vector, *mask_numbers(p)),
    )
    constants = wants_norm_bias, wants_bias, rms, vector, block_rows, block_columns
    started = launch(_backward_kernel, grid, arguments, constants, **warps)
    sum_partials(partial_PKN[:started], sums_KN)
    return dx, dresidual, sums_KN


def _empty_gradients(
    dy: Tensor, more_dy: Tensor | None, ds: Tensor | None, s: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wants_norm_bias, wants_bias, x_dtype, residual_dtype, sums_dtype = rest[-5:]
    dx = torch.empty(s.shape, dtype=x_dtype, device=s.device)
    shape = (0,) if residual_dtype is None else s.shape
    dresidual = torch.empty(shape, dtype=residual_dtype or x_dtype, device=s.device)
    num_sums = 1 + wants_norm_bias + wants_bias
    wide = torch.promote_types(s.dtype, torch.float32)
    return dx, dresidual, torch.empty(num_sums, s.shape[-1], dtype=sums_dtype or wide, device=s.device)


@kernel
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr,
    more_dy_ptr,
    ds_ptr,
    s_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    seed_ptr,
    row_indices_ptr,
    dx_ptr,
    dresidual_ptr,
    partial_ptr,
    num_rows,
    num_columns,
    dy_stride,
    more_dy_stride,
    ds_stride,
    s_stride,
    threshold,
    scale,
    NORM_BIAS: tl.constexpr,
    BIAS: tl.constexpr,
    RMS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_COLUMNS)
    width = num_columns * VECTOR
    in_row = columns < width
    weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    dnorm_bias = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    dbias = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    # The sums need no mask: beyond a row's end dy and weight are 0, so w is 0, and those columns are not stored; below
    # the last row rstd is 0, so n and ds are 0.
    num_stages: tl.constexpr = 2 if BLOCK_COLUMNS <= 8192 else 1  # as in forward
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(0), num_stages=num_stages):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        in_column = rows < num_rows
        live = in_column[:, None] & in_row[None, :]
        row = rows.to(tl.int64)[:, None]
        out = row * width + columns[None, :]
        dy = tl.load(dy_ptr + row * dy_stride * VECTOR + columns[None, :], mask=live, other=0.0).to(tl.float32)
        if more_dy_ptr is not None:
            more = tl.load(more_dy_ptr + row * more_dy_stride * VECTOR + columns[None, :], mask=live, other=0.0)
            dy += more.to(tl.float32)
        n = tl.load(s_ptr + row * s_stride * VECTOR + columns[None, :], mask=live, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=in_column, other=0.0)[:, None]
        if not RMS:
            n -= tl.load(mean_ptr + rows, mask=in_column, other=0.0)[:, None]
        n *= rstd
        dweight += dy * n
        if NORM_BIAS:
            dnorm_bias += dy
        w = dy * weight
        ds = w - n * (tl.sum(w * n, 1) / width)[:, None]
        if not RMS:
            ds -= (tl.sum(w, 1) / width)[:, None]
        ds *= rstd
        if ds_ptr is not None:
            incoming = tl.load(ds_ptr + row * ds_stride * VECTOR + columns[None, :], mask=live, other=0.0)
            ds += incoming.to(tl.float32)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + out, ds.to(dresidual_ptr.dtype.element_ty), mask=live)
        if seed_ptr is not None:
            keep = keep_tile(seed_ptr, row_indices_ptr, 0, rows, num_rows, 0, threshold, BLOCK_ROWS, BLOCK_COLUMNS)
            ds *= tl.where(keep, scale, 0.0)
        if BIAS:
            dbias += ds
        tl.store(dx_ptr + out, ds.to(dx_ptr.dtype.element_ty), mask=live)
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * width * (1 + NORM_BIAS + BIAS) + columns
    tl.store(partial, tl.sum(dweight, 0), mask=in_row)
    if NORM_BIAS:
        tl.store(partial + width, tl.sum(dnorm_bias, 0), mask=in_row)
    if BIAS:
        tl.store(partial + (1 + NORM_BIAS) * width, tl.sum(dbias, 0), mask=in_row)


normalise_backward = define(
    "normalise_backward(Tensor dy, Tensor? more_dy, Tensor? ds, Tensor s, Tensor weight, Tensor mean, Tensor rstd, "
    "Tensor? seed, Tensor? row_indices, float p, bool rms, bool wants_norm_bias, bool wants_bias, ScalarType x_dtype, "
    "ScalarType? residual_dtype, ScalarType? sums_dtype) -> (Tensor, Tensor, Tensor)",
    _launch_backward,
    _empty_gradients,
)
