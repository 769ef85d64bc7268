"""elementwise -- y = dropout(activation(x + bias), p) + residual: formula, kernels and gradients.

    dropout                   y = dropout(x, p)
    bias_activation_dropout   y = dropout(activation(x + bias), p)
    bias_dropout_residual     y = dropout(x + bias, p) + residual

These three ops check their arguments and call this file. Triton compiles a kernel for each combination of the parts, so
absent parts take no instructions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.dispatch import is_compiling, is_of_a_transform, jit_is_tracing, transforms_are_active
from .activations import ACTIVATIONS, activate_tile, slope_tile
from .cpu import name_of, pointer, rows, run, vector
from .implementations import backward_takes_formula, define, differentiable, gradients_by_formula, in_cpp, needs_grad
from .implementations.launch import kernel, launch, most_programs
from .implementations.triton_language import tl
from .philox import keep_factors, keep_scale, keep_tile, mask_numbers
from .rows import WARPS_WITH_SUMS, as_rows, column_tile, elementwise_plan
from .sums import sum_of_rows, sum_partials

__all__ = ["dropout_formula", "dropout_op", "elementwise_formula", "fused_dropout", "fused_elementwise", "masked"]


def elementwise_formula(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    row_R: Tensor | None,
    first_column: int,
    activation: str | None,
    p: float,
) -> Tensor:
    """Return dropout(activation(x + bias), p) + residual."""
    y = x if bias is None else x + bias
    y = y if activation is None else ACTIVATIONS[activation](y)
    y = y if seed is None else dropout_formula(y, seed, row_R, first_column, p)
    return y if residual is None else y + residual


def dropout_formula(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
    """Return the dropout of x at a position in a larger tensor. Used by the formulas of all ops with dropout."""
    # Note: [two functions] Transforms need a vmap rule and a jvp. Dynamo refuses an autograd function with a jvp, and
    # eager mode needs neither.
    if not is_compiling() and (transforms_are_active() or is_of_a_transform(x) or is_of_a_transform(seed)):
        y: Tensor = _SeededDropout.apply(x, seed, row_R, first_column, p)  # type: ignore[no-untyped-call]
        return y
    return _dropped(masked, x, seed, row_R, first_column, p)


def _dropped(
    drop: Callable[..., Tensor], x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float
) -> Tensor:
    y: Tensor = (
        _Dropout.apply(drop, x, seed, row_R, first_column, p)  # type: ignore[no-untyped-call]
        if needs_grad(x) and not jit_is_tracing()  # a trace cannot record a function written in Python
        else drop(x, seed, row_R, first_column, p)
    )
    return y


def masked(
    x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float, *, again: bool = False
) -> Tensor:
    # In bfloat16 the scale would be off by up to 0.4 %, and so would the mean of the result.
    wide = torch.promote_types(x.dtype, torch.float32)
    factor = keep_factors(seed, x.shape, row_R, first_column, p=p, again=again).to(wide) * keep_scale(p)
    y = x.to(wide) * factor
    # Note: [no cast that does nothing] If an autograd function ends in such a cast, Dynamo of torch 2.11 silently loses
    # the incoming gradient, and every gradient before it is zero.
    return y if x.dtype == wide else y.to(x.dtype)


class _SeededDropout(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
        return masked(x, seed, row_R, first_column, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, seed, row_R, *ctx.options = inputs
        ctx.save_for_backward(seed, row_R)
        ctx.save_for_forward(seed, row_R)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = dropout_formula(dy, *ctx.saved_tensors, *ctx.options)
        return dx, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, *_: None) -> Tensor:
        return dropout_formula(x_tangent, *ctx.saved_tensors, *ctx.options)


class _Dropout(torch.autograd.Function):
    """Dropout by `drop`, which is the formula or the op, in eager mode and under compilers.

    It has no `setup_context`: with `setup_context`, torch inspects the signature at each call, which takes 40 us.
    """

    @staticmethod
    def forward(
        ctx: Any,
        drop: Callable[..., Tensor],
        x: Tensor,
        seed: Tensor,
        row_R: Tensor | None,
        first_column: int,
        p: float,
    ) -> Tensor:
        ctx.save_for_backward(seed, row_R)
        ctx.drop, ctx.options = drop, (first_column, p)
        return drop(x, seed, row_R, first_column, p)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.drop is masked and is_compiling():
            dx = masked(dy, *ctx.saved_tensors, *ctx.options, again=True)
        else:
            drop = dropout_formula if ctx.drop is masked or backward_takes_formula() else dropout_op
            dx = drop(dy, *ctx.saved_tensors, *ctx.options)
        return None, dx, None, None, None, None


class _Elementwise(torch.autograd.Function):
    """Its gradients are those of an op with an activation or a residual, but not with both."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        row_R: Tensor | None,
        *options: Any,
    ) -> Tensor:
        _, activation, _ = ctx.options = options
        assert residual is None or activation is None
        # The identity has slope one everywhere, so backward needs only the dtypes of x and bias.
        ctx.save_for_backward(*((x, bias) if activation is not None else (None, None)), seed, row_R)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, residual, bias)]
        y: Tensor = _forward(x, residual, bias, seed, row_R, *options)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, seed, row_R = ctx.saved_tensors
        first_column, activation, p = ctx.options
        x_dtype, residual_dtype, bias_dtype = ctx.dtypes
        wants_x, wants_residual, wants_bias = ctx.needs_input_grad[:3]
        dx = dbias = None
        by_formula = backward_takes_formula()
        if by_formula and activation is not None:

            def formula(x: Tensor, bias: Tensor | None) -> Tensor:
                return elementwise_formula(x, None, bias, seed, row_R, first_column, activation, p)

            dx, dbias = gradients_by_formula(formula, (x, bias), dy, (wants_x, wants_bias))
        elif activation is None and (by_formula or seed is None):  # without dropout plain torch makes no copy
            dz = dy if seed is None else dropout_formula(dy, seed, row_R, first_column, p)
            dx = dz.to(x_dtype)
            dbias = sum_of_rows(dz).to(bias_dtype) if wants_bias else None
        elif activation is not None or wants_bias:
            dx, dbias = _backward(
                *(dy, x, bias, seed, row_R, first_column, activation, p, x_dtype),
                bias_dtype if wants_bias else None,
            )
        elif wants_x:
            dx = dropout_op(dy, seed, row_R, first_column, p).to(x_dtype)
        return (
            dx if wants_x else None,
            dy.to(residual_dtype) if wants_residual else None,
            dbias if wants_bias else None,
            *(None,) * 5,
        )


def _launch_forward(
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
    y = _empty_result(x, residual, bias)
    if not y.numel():
        return y
    if in_cpp(y):
        bias = vector(bias)
        columns = y.shape[-1] if y.dim() else 1
        run(
            "elementwise_forward",
            *(rows(x), rows(residual), pointer(bias), rows(y), name_of(activation)),
            *_mask_arguments(seed, row_R, first_column, p),
            *(y.numel() // columns, columns),
        )
        return y
    x_RN = as_rows(x if x.dim() else x.reshape(1, 1))
    residual_RN = None if residual is None else as_rows(residual)
    strides = x_RN.stride(0), 0 if residual_RN is None else residual_RN.stride(0)
    plan = elementwise_plan(x.element_size(), *x_RN.shape, *strides)
    launch(
        _forward_kernel,
        plan.grid,
        (
            *(x_RN, residual_RN, None if bias is None else bias.contiguous(), y, seed, row_R, first_column // 8),
            *(*plan.sizes, *mask_numbers(p)),
        ),
        (activation, y.dtype == torch.float32, *plan.constants),
    )
    return y


def _empty_result(x: Tensor, residual: Tensor | None = None, bias: Tensor | None = None, *_: Any) -> Tensor:
    """Return an empty result, in the promoted dtype of the summands."""
    dtype = x.dtype
    for summand in (residual, bias):
        dtype = dtype if summand is None else torch.promote_types(dtype, summand.dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _mask_arguments(seed: Tensor | None, row_R: Tensor | None, first_column: int, p: float) -> tuple[Any, ...]:
    """Return a mask as arguments of the kernels in C++."""
    return pointer(seed), pointer(row_R), first_column, *mask_numbers(p)


@kernel
def _forward_kernel(  # type: ignore[no-untyped-def]
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


def _launch_backward(
    dy: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    row_R: Tensor | None,
    first_column: int,
    activation: str | None,
    p: float,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    dx, dbias = _empty_gradients(dy, x_dtype, bias_dtype)
    if not dy.numel():
        return dx, dbias.zero_()
    if in_cpp(dy):
        bias = vector(bias)
        sums = None if bias_dtype is None else dy.new_empty(dy.shape[-1], dtype=torch.float32)
        run(
            "elementwise_backward",
            *(rows(dy), rows(x), pointer(bias), rows(dx), pointer(sums), name_of(activation)),
            *_mask_arguments(seed, row_R, first_column, p),
            *(dy.numel() // dy.shape[-1], dy.shape[-1]),
        )
        return dx, dbias if sums is None else sums.to(dbias.dtype)
    dy_RN = as_rows(dy)
    x_RN = dy_RN if x is None else as_rows(x)
    plan = elementwise_plan(dy.element_size(), *dy_RN.shape, dy_RN.stride(0), x_RN.stride(0))
    tensors = dy_RN, x_RN, None if bias is None else bias.contiguous(), seed, row_R, first_column // 8, dx
    numbers = *plan.sizes, *mask_numbers(p)
    constants = activation, dy.dtype == torch.float32, *plan.constants
    if bias_dtype is None:
        launch(_backward_kernel, plan.grid, (*tensors, None, *numbers), constants)
        return dx, dbias
    # Each program sums its rows and writes one row: without atomics the sums are deterministic.
    num_programs = most_programs(plan.grid, dy.device, persistent_warps=WARPS_WITH_SUMS)
    partial_PN = torch.empty(num_programs, dy_RN.shape[1], dtype=torch.float32, device=dy.device)
    arguments = *tensors, partial_PN, *numbers
    started = launch(_backward_kernel, plan.grid, arguments, constants, persistent_warps=WARPS_WITH_SUMS)
    sum_partials(partial_PN[:started], dbias)
    return dx, dbias


def _empty_gradients(dy: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    x_dtype, bias_dtype = rest[-2:]
    dx = torch.empty_like(dy, dtype=x_dtype, memory_format=torch.contiguous_format)
    return dx, torch.empty(0 if bias_dtype is None else dy.shape[-1], dtype=bias_dtype or x_dtype, device=dy.device)


@kernel
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr,
    x_ptr,
    bias_ptr,
    seed_ptr,
    row_indices_ptr,
    first_group,
    dx_ptr,
    partial_ptr,
    num_rows,
    num_columns,
    dy_stride,
    x_stride,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    EXACT: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    first_column = column_tile() * BLOCK_COLUMNS
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    in_row = columns < num_columns * VECTOR
    dbias = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(0), num_stages=2):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = (rows < num_rows)[:, None] & in_row[None, :]
        row = rows.to(tl.int64)[:, None]
        dz = tl.load(dy_ptr + row * dy_stride * VECTOR + columns[None, :], mask=live, other=0.0).to(tl.float32)
        if seed_ptr is not None:
            keep = keep_tile(
                seed_ptr,
                row_indices_ptr,
                first_group,
                rows,
                num_rows,
                first_column,
                threshold,
                BLOCK_ROWS,
                BLOCK_COLUMNS,
            )
            dz *= tl.where(keep, scale, 0.0)
        if ACTIVATION is not None:
            z = tl.load(x_ptr + row * x_stride * VECTOR + columns[None, :], mask=live, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                z += bias
            dz *= slope_tile(z, ACTIVATION, EXACT)
        tl.store(dx_ptr + row * (num_columns * VECTOR) + columns[None, :], dz.to(dx_ptr.dtype.element_ty), mask=live)
        if partial_ptr is not None:
            dbias += tl.where(live, dz, 0.0)
    if partial_ptr is not None:
        partial = partial_ptr + tl.program_id(0).to(tl.int64) * (num_columns * VECTOR) + columns
        tl.store(partial, tl.sum(dbias, 0), mask=in_row)


def _launch_dropout(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
    return _launch_forward(x, None, None, seed, row_R, first_column, None, p)


dropout_op = define(
    "dropout(Tensor x, Tensor seed, Tensor? row_indices, int first_column, float p) -> Tensor",
    _launch_dropout,
    lambda x, *_: _empty_result(x),
)
fused_dropout = partial(_dropped, dropout_op)
_forward = define(
    "bias_activation_dropout(Tensor x, Tensor? residual, Tensor? bias, Tensor? seed, Tensor? row_indices, "
    "int first_column, str? activation, float p) -> Tensor",
    _launch_forward,
    _empty_result,
)
_backward = define(
    "bias_activation_dropout_backward(Tensor dy, Tensor? x, Tensor? bias, Tensor? seed, Tensor? row_indices, "
    "int first_column, str? activation, float p, ScalarType x_dtype, ScalarType? bias_dtype) -> (Tensor, Tensor)",
    _launch_backward,
    _empty_gradients,
)
fused_elementwise = differentiable(_Elementwise, _forward)
