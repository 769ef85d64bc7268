"""elementwise -- y = dropout(activation(x + bias), p) + residual; each op with dropout uses a part of it.

It is the forward kernel of bias_activation_dropout and bias_dropout_residual, and the kernel of dropout. Absent parts
take no instructions: Triton compiles the kernel for each combination.
"""

from typing import Any

import torch
from torch import Tensor

from .activations import activate_tile
from .cpu import name_of, pointer, rows, run, vector
from .implementations import in_cpp
from .implementations.launch import kernel, launch
from .implementations.triton_language import tl
from .philox import keep_tile, mask_numbers
from .rows import as_rows, column_tile, elementwise_plan

__all__ = ["empty_elementwise", "launch_elementwise", "mask_arguments"]


def launch_elementwise(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    row_R: Tensor | None,
    first_column: int,
    activation: str | None,
    p: float,
) -> Tensor:
    """Return dropout(activation(x + bias), p) + residual, contiguous.

    Args:
        x, residual: [..., N]; x may have no dimension.
        bias: [N].
        seed: the mask's seed; None drops nothing.
        row_R, first_column: the position in a larger tensor, as `shards.locate` returns it.
        activation: as in `activate`.
        p: the dropout probability.
    """
    y = empty_elementwise(x, residual, bias)
    if not y.numel():
        return y
    if in_cpp(y):
        bias = vector(bias)
        columns = y.shape[-1] if y.dim() else 1
        run(
            "elementwise_forward",
            *(rows(x), rows(residual), pointer(bias), rows(y), name_of(activation)),
            *mask_arguments(seed, row_R, first_column, p),
            *(y.numel() // columns, columns),
        )
        return y
    x_RN = as_rows(x if x.dim() else x.reshape(1, 1))
    residual_RN = None if residual is None else as_rows(residual)
    strides = x_RN.stride(0), 0 if residual_RN is None else residual_RN.stride(0)
    plan = elementwise_plan(x.element_size(), *x_RN.shape, *strides)
    launch(
        _elementwise_kernel,
        plan.grid,
        (
            *(x_RN, residual_RN, None if bias is None else bias.contiguous(), y, seed, row_R, first_column // 8),
            *(*plan.sizes, *mask_numbers(p)),
        ),
        (activation, y.dtype == torch.float32, *plan.constants),
    )
    return y


def empty_elementwise(x: Tensor, residual: Tensor | None = None, bias: Tensor | None = None, *_: Any) -> Tensor:
    """Return an empty result, in the promoted dtype of the summands."""
    dtype = x.dtype
    for summand in (residual, bias):
        dtype = dtype if summand is None else torch.promote_types(dtype, summand.dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def mask_arguments(seed: Tensor | None, row_R: Tensor | None, first_column: int, p: float) -> tuple[Any, ...]:
    """Return a mask as arguments of the kernels in C++."""
    return pointer(seed), pointer(row_R), first_column, *mask_numbers(p)


@kernel
def _elementwise_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    bias_ptr,
    y_ptr,
    seed_ptr,
    row_indices_ptr,
    first_group,
    num_rows,
    num_columns,
    x_stride,
    residual_stride,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    EXACT: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first_column = column_tile() * BLOCK_COLUMNS
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    in_row = columns < num_columns * VECTOR
    live = (rows < num_rows)[:, None] & in_row[None, :]
    row = rows.to(tl.int64)[:, None]
    z = tl.load(x_ptr + row * x_stride * VECTOR + columns[None, :], mask=live, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride * VECTOR + columns[None, :], mask=live, other=0.0)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    y = activate_tile(z, ACTIVATION, EXACT)
    if seed_ptr is not None:
        keep = keep_tile(
            seed_ptr, row_indices_ptr, first_group, rows, num_rows, first_column, threshold, BLOCK_ROWS, BLOCK_COLUMNS
        )
        y *= tl.where(keep, scale, 0.0)
    if residual_ptr is not None:
        y += residual.to(tl.float32)
    tl.store(y_ptr + row * (num_columns * VECTOR) + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=live)
