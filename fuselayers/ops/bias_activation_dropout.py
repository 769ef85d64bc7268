"""bias_activation_dropout -- y = dropout(activation(x + bias), p): the part of an MLP between its two matmuls.

    x, y   [..., N]   any float dtype
    bias   [N]        optional
    seed   []         int64

    forward    y     = act(x + bias) * keep * scale
    backward   dx    = dy * keep * scale * act'(x + bias)
               dbias = dx summed over every dimension but the last

Saved for backward: a seed and no dropout mask (see dropout, also for shards). The kernels also save x and the bias. The
eager formula also saves what its activation saves: the pre-activation, the positive part for relu, squared_relu and
star_relu, the result for sigmoid, two tensors and a bool mask for smelu. The identity saves nothing more.

Bytes moved, in elements of x: 2 forward (read x, write y), 3 backward (read dy and x, write dx; 2 for the identity, and
1 for the identity without dropout: dx is dy, which torch sums for the bias). In addition, each program of a kernel
reads the bias and writes one float32 row for its gradient.

Formula and kernels also add a residual, for bias_dropout_residual.
"""

from typing import Any

import torch
from torch import Tensor

from .activations import ACTIVATIONS, activate, check_activation, slope_tile
from .cpu import name_of, pointer, rows, run, vector
from .draw import seed_or_draw
from .dropout import dropout_formula, dropout_op, dropout_reference
from .elementwise import empty_elementwise, launch_elementwise, mask_arguments
from .implementations import Op, backward_takes_formula, define, differentiable, gradients_by_formula, in_cpp
from .implementations.launch import kernel, launch, most_programs
from .implementations.triton_language import tl
from .philox import keep_tile, mask_numbers
from .rows import WARPS_WITH_SUMS, as_rows, column_tile, elementwise_plan
from .shapes import check_row_vector, check_rows
from .shards import Shard, locate
from .sums import sum_of_rows, sum_partials

__all__ = ["bias_activation_dropout", "bias_activation_dropout_reference", "elementwise_formula", "fused_elementwise"]


def bias_activation_dropout(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    shard: Shard | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return dropout(activation(x + bias), p).

    Args:
        x: [..., N], any float dtype.
        bias: [N], or None for no bias.
        activation: a name in ACTIVATIONS, or None for the identity.
        p: dropout probability, 0 <= p <= 1.
        training: False drops nothing.
        seed: int64 tensor of shape [] on x's device, which fixes the mask; drawn from torch's generator when None.
        shard: the position of x in a larger tensor, whose mask it uses; None if x is the whole tensor.
        backend: see `fuselayers.ops.implementations.dispatch`.

    Without a bias, an activation and dropout x itself is returned.

    Raises:
        ValueError: x has no dimension, the bias, the seed or the shard does not fit it, the activation or the backend
            is unknown, or p is outside [0, 1].
        TypeError: a tensor is not dense and floating, the seed is not a tensor, p is a tensor, the activation is not a
            string, or `shard` is not a Shard.
        RuntimeError: without a seed, inside a `torch.vmap` whose `randomness` is "error", which is its default; or the
            requested backend cannot take the call.

    >>> import torch
    >>> bias_activation_dropout(torch.tensor([[-1.0, 2.0]]), torch.tensor([0.5, 0.5]), activation="relu")
    tensor([[0.0000, 2.5000]])
    """
    check_rows("x", x)
    check_row_vector("bias", bias, x)
    check_activation(activation)
    seed = seed_or_draw(x, p, training=training, seed=seed)
    row_R, column, reason = (None, 0, None) if shard is None else locate(shard, x, dropping=seed is not None)
    if bias is None and activation is None and seed is None:
        return x
    y: Tensor = _op(
        backend,
        (x, None, bias, seed, row_R),
        (column, activation, p),
        unsupported_reason=reason,
    )
    return y


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
    """Return dropout(activation(x + bias), p) + residual. Used here and by bias_dropout_residual."""
    y = x if bias is None else x + bias
    y = y if activation is None else ACTIVATIONS[activation](y)
    y = y if seed is None else dropout_formula(y, seed, row_R, first_column, p)
    return y if residual is None else y + residual


def bias_activation_dropout_reference(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """The definition of the op in training, in plain torch; without a seed nothing is dropped."""
    y = activate(x if bias is None else x + bias, activation)
    return y if seed is None else dropout_reference(y, p, seed=seed, shard=shard)


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
            *mask_arguments(seed, row_R, first_column, p),
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


_forward = define(
    "bias_activation_dropout(Tensor x, Tensor? residual, Tensor? bias, Tensor? seed, Tensor? row_indices, "
    "int first_column, str? activation, float p) -> Tensor",
    launch_elementwise,
    empty_elementwise,
)
_backward = define(
    "bias_activation_dropout_backward(Tensor dy, Tensor? x, Tensor? bias, Tensor? seed, Tensor? row_indices, "
    "int first_column, str? activation, float p, ScalarType x_dtype, ScalarType? bias_dtype) -> (Tensor, Tensor)",
    _launch_backward,
    _empty_gradients,
)
fused_elementwise = differentiable(_Elementwise, _forward)
_op = Op("bias_activation_dropout", elementwise_formula, fused_elementwise)
