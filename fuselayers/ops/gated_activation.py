"""gated_activation -- y = act(gate) * up: the gate of a gated MLP (swiglu, geglu, reglu; glu for sigmoid).

    gate, up, y   [..., N]    any float dtype
    gate packed   [..., 2N]   the gate's half first, when `up` is None

    forward    y     = act(gate) * up
    backward   dgate = dy * up * act'(gate)
               dup   = dy * act(gate)

Saved for backward: gate and up. The eager formula saves act(gate) too, so three tensors of up's size (two for the
identity, and for relu and sigmoid, which save their result in place of the gate; four and a mask for smelu).

Bytes moved by the kernels, in elements of y: 3 forward (read gate and up, write y), 5 backward (read dy, gate and up,
write two gradients).

Shazeer, "GLU variants improve transformer", 2020.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .activations import activate, activate_tile, check_activation, slope_tile
from .cpu import name_of, rows, run
from .implementations import Op, backward_takes_formula, define, differentiable, gradients_by_formula, in_cpp
from .implementations.launch import kernel, launch
from .implementations.triton_language import tl
from .rows import as_rows, column_tile, elementwise_plan
from .shapes import check_like, check_rows

__all__ = ["gated_activation", "gated_activation_reference"]


def gated_activation(
    gate: Tensor, up: Tensor | None = None, *, activation: str | None = "silu", backend: str = "auto"
) -> Tensor:
    """Return activation(gate) * up.

    Args:
        gate: [..., N], any float dtype; or [..., 2N] with gate and up side by side when `up` is None.
        up: [..., N] or None.
        activation: a name in ACTIVATIONS, or None for the identity (a bilinear layer).
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: gate has no dimension, up does not fit it, a packed gate has an odd width, or the activation or the
            backend is unknown.
        TypeError: a tensor is not dense and floating, or the activation is not a string.
        RuntimeError: the requested backend cannot take the call.

    >>> import torch
    >>> gated_activation(torch.tensor([2.0, -1.0, 3.0, 5.0]), activation="relu")
    tensor([6., 0.])
    """
    check_rows("gate", gate)
    check_activation(activation)
    if up is not None:
        check_like("up", up, gate)
    elif gate.shape[-1] % 2:
        raise ValueError(f"a packed gate must have an even last dimension, got {list(gate.shape)}")
    y: Tensor = _op(backend, (gate, up), (activation,))
    return y


def _formula(gate: Tensor, up: Tensor | None, activation: str | None) -> Tensor:
    gate, up = _halves(gate, up)
    return activate(gate, activation) * up


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1)
    return first, second


def gated_activation_reference(gate: Tensor, up: Tensor, *, activation: str | None = "silu") -> Tensor:
    """The definition of the op, in plain torch."""
    return activate(gate, activation) * up


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        y: Tensor = _forward(gate, up, activation)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if backward_takes_formula():
            formula = partial(_formula, activation=ctx.activation)
            return (*gradients_by_formula(formula, (gate, up), dy, ctx.needs_input_grad[:2]), None)
        dgate, dup = _backward(dy, gate, up, ctx.activation)
        wants_gate, wants_up = ctx.needs_input_grad[:2]
        return dgate if wants_gate else None, dup if wants_up else None, None


def _launch_forward(gate: Tensor, up: Tensor | None, activation: str | None) -> Tensor:
    y = _empty_result(gate, up, activation)
    if not y.numel():
        return y
    if in_cpp(gate):
        halves = map(rows, _halves(gate, up))
        run("gated_forward", *halves, rows(y), name_of(activation), y.numel() // y.shape[-1], y.shape[-1])
        return y
    # The halves of a packed gate are strided rows.
    gate_RN, up_RN = map(as_rows, _halves(gate, up))
    plan = elementwise_plan(gate.element_size(), *gate_RN.shape, gate_RN.stride(0), up_RN.stride(0))
    launch(
        _forward_kernel,
        plan.grid,
        (gate_RN, up_RN, y, *plan.sizes),
        (activation, y.dtype == torch.float32, *plan.constants),
    )
    return y


def _empty_result(gate: Tensor, up: Tensor | None, activation: str | None) -> Tensor:
    width = gate.shape[-1] // 2 if up is None else gate.shape[-1]
    dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
    return torch.empty(*gate.shape[:-1], width, dtype=dtype, device=gate.device)


def _launch_backward(dy: Tensor, gate: Tensor, up: Tensor | None, activation: str | None) -> tuple[Tensor, Tensor]:
    dgate, dup = _empty_gradients(dy, gate, up, activation)
    if not dy.numel():
        return dgate, dup
    if in_cpp(dy):
        tensors = dy, *_halves(gate, up), *_halves(dgate, None if up is None else dup)
        run("gated_backward", *map(rows, tensors), name_of(activation), dy.numel() // dy.shape[-1], dy.shape[-1])
        return dgate, dup
    dy_RN, gate_RN, up_RN = map(as_rows, (dy, *_halves(gate, up)))
    # Both halves of a packed gradient are written in place, so no concatenation follows.
    dgate_RN, dup_RN = map(as_rows, _halves(dgate, None if up is None else dup))
    strides = (rows.stride(0) for rows in (dy_RN, gate_RN, up_RN, dgate_RN))
    plan = elementwise_plan(dy.element_size(), *dy_RN.shape, *strides)
    launch(
        _backward_kernel,
        plan.grid,
        (dy_RN, gate_RN, up_RN, dgate_RN, dup_RN, *plan.sizes),
        (activation, dy.dtype == torch.float32, *plan.constants),
    )
    return dgate, dup


def _empty_gradients(dy: Tensor, gate: Tensor, up: Tensor | None, activation: str | None) -> tuple[Tensor, Tensor]:
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return dgate, gate.new_empty(0) if up is None else torch.empty(up.shape, dtype=up.dtype, device=up.device)


@kernel
def _forward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    y_ptr,
    num_rows,
    num_columns,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    EXACT: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = column_tile() * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    live = (rows < num_rows)[:, None] & (columns < num_columns * VECTOR)[None, :]
    row, column = rows.to(tl.int64)[:, None], columns[None, :]
    gate = tl.load(gate_ptr + row * gate_stride * VECTOR + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride * VECTOR + column, mask=live, other=0.0).to(tl.float32)
    y = activate_tile(gate, ACTIVATION, EXACT) * up
    tl.store(y_ptr + row * (num_columns * VECTOR) + column, y.to(y_ptr.dtype.element_ty), mask=live)


@kernel
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    num_rows,
    num_columns,
    dy_stride,
    gate_stride,
    up_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    EXACT: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = column_tile() * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    live = (rows < num_rows)[:, None] & (columns < num_columns * VECTOR)[None, :]
    row, column = rows.to(tl.int64)[:, None], columns[None, :]
    dy = tl.load(dy_ptr + row * dy_stride * VECTOR + column, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride * VECTOR + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride * VECTOR + column, mask=live, other=0.0).to(tl.float32)
    dgate = dy * up * slope_tile(gate, ACTIVATION, EXACT)
    dup = dy * activate_tile(gate, ACTIVATION, EXACT)
    out = row * out_stride * VECTOR + column
    tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=live)
    tl.store(dup_ptr + out, dup.to(dup_ptr.dtype.element_ty), mask=live)


_forward = define(
    "gated_activation(Tensor gate, Tensor? up, str? activation) -> Tensor",
    _launch_forward,
    _empty_result,
)
_backward = define(
    "gated_activation_backward(Tensor dy, Tensor gate, Tensor? up, str? activation) -> (Tensor, Tensor)",
    _launch_backward,
    _empty_gradients,
)
_op = Op("gated_activation", _formula, differentiable(_GatedActivation, _forward))
