"""linear_activation -- y = act(x W^T + b): a linear layer with the activation in the matmul's epilogue.

    x        [..., K]   any float dtype; R rows of it
    weight   [N, K]     of x's dtype, as in nn.Linear
    bias     [N]        optional, of x's dtype
    y, z     [..., N]   of x's dtype; z = x W^T + b

    forward    y       = act(z)
    backward   dz      = dy * act'(z)
               dx      = dz W
               dweight = dz^T x
               dbias   = dz summed over every dimension but the last

Saved for backward: x, the weight, and z; y in place of z where it gives the same slope (relu, leaky_relu), and neither
for the identity. The kernel saves the bias too, for a second derivative: unlike with F.linear, it must not be changed
in place before backward. The eager formula saves what its activation saves.

Bytes moved, in elements: R K + N K + R N forward, and R N more where z is saved, for 2 R N K operations; the kernel
reads tiles of x and of the weight again where the caches miss. cuBLAS and a separate activation kernel move 2 R N more
(R N where z is saved). Backward moves 3 R N for dz and dbias beside the two matmuls (2 for the identity).

The kernel computes y from the float32 sums and the slope from z in the result's dtype: y is rounded once where plain
torch rounds twice, and the gradients are as exact as torch's.

Under autocast it behaves as F.linear: it casts all three tensors to autocast's dtype, which the result has too.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch.dispatch import is_compiling
from .activations import activate, activate_tile, check_activation
from .bias_activation_dropout import activation_gradients, bias_activation_dropout_op
from .implementations import (
    Op,
    autocast_dtype,
    define,
    differentiable_gradients,
    needs_grad,
    uses_kernels,
    without_repeats,
)
from .implementations.launch import kernel, launch, num_processors
from .implementations.triton_language import tl
from .rows import cdiv, next_power_of_2, vector_of
from .shapes import check_linear

__all__ = ["linear_activation", "linear_activation_reference"]

# Activations whose slope at the result is the slope at the pre-activation.
_SLOPE_OF_RESULT: Final = frozenset({"relu", "leaky_relu"})

# (rows, columns, inner, warps, stages) of a tile: large, where such tiles occupy all processors; small; and for sizes
# that are no multiples of 8, whose single-element loads and stores would spill in a larger tile. At most 96 KiB of
# shared memory: sm_86 and sm_120 have 99. Compiled for sm_80, sm_90, sm_100 and gfx942, none of them spills.
_TILES: Final = {
    "16 bits": ((128, 128, 64, 8, 3), (64, 64, 64, 4, 3), (64, 64, 32, 4, 3)),
    "tf32": ((128, 128, 32, 8, 3), (64, 64, 32, 4, 3), (64, 64, 32, 4, 3)),
    "ieee": ((128, 128, 16, 8, 3), (64, 64, 16, 8, 3), (64, 64, 16, 8, 3)),
}
_SMALLEST: Final = 16  # the smallest size of tl.dot
# Row tiles that run before the next column tile: their rows of x stay in the L2 cache.
_GROUP: Final = 8


def linear_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, backend: str = "auto"
) -> Tensor:
    """Return activation(x @ weight.T + bias).

    Args:
        x: [..., K], any float dtype.
        weight: [N, K].
        bias: [N], or None for no bias.
        activation: a name in ACTIVATIONS, or None for the identity.
        backend: "auto", which calls cuBLAS for the matmul, "eager" for the formula, or "triton" for the matmul with an
            epilogue, inside a compiled function too.

    Raises:
        ValueError: x has no dimension, weight or bias do not fit it, or the activation or the backend is unknown.
        TypeError: a tensor is not dense and floating or, outside autocast, not of x's dtype; or the activation is no
            name.
        RuntimeError: backend "triton" cannot take the call.

    >>> import torch
    >>> linear_activation(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [1.0, -1.0]]), activation="relu")
    tensor([3., 0.])
    """
    check_linear(x, weight, bias)
    check_activation(activation)
    # Note: [which matmul] Our epilogue saves two trips of y to memory, but cuBLAS is a better matmul than ours. Which
    # effect is larger has not been measured on a GPU, so "auto" takes the one that cannot be slower than F.linear and
    # an activation. So do compilers that take the library's kernels.
    y: Tensor
    if backend == "auto":
        y = _op(backend, (x, weight, bias), (activation,))
        return y
    if not uses_kernels(backend, x, weight, bias):
        return _formula(x, weight, bias, activation)
    dtype = autocast_dtype(x.device)
    if dtype is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if is_compiling():
        x, weight, bias = without_repeats((x, weight, bias))
    if needs_grad(x, weight, bias):
        y = _LinearActivation.apply(x, weight, bias, activation)  # type: ignore[no-untyped-call]
        return y
    y, _ = _forward(x, weight, bias, activation, False)
    return y


def linear_activation_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None
) -> Tensor:
    """The definition of the op, in plain torch."""
    return _formula(x, weight, bias, activation)


def _formula(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    return activate(F.linear(x, weight, bias), activation)


def _beside_cublas(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """cuBLAS adds the bias to its sums before rounding; the activation is a separate kernel.

    `torch._addmm_activation` would leave the activation to cuBLASLt, but its relu turns NaN into 0
    (https://forums.developer.nvidia.com/t/329783), its gelu is the tanh form with undocumented precision, neither
    returns z, and for K = 0 torch skips the activation.
    """
    if activation is None:
        return F.linear(x, weight, bias)
    # As rows: with a strided x of more dimensions torch adds the bias in a separate kernel.
    z = F.linear(_as_rows(x), weight, None if bias is None else bias.detach())
    z = z.view(*x.shape[:-1], weight.shape[0])
    if needs_grad(z, bias):
        y: Tensor = _Activation.apply(z, bias, activation)  # type: ignore[no-untyped-call]
        return y
    return _activated(z, activation)


def _activated(z: Tensor, activation: str) -> Tensor:
    # Not the public function, which takes its formula while a graph is compiled.
    y: Tensor = bias_activation_dropout_op(z, None, None, None, 0, activation, 0.0)
    return y


class _Activation(torch.autograd.Function):
    """act(z) for a z that includes the bias.

    The bias is an argument for its gradient: the kernel that computes dz sums it too, where the backward of F.linear
    would read dz from memory again.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        y = _activated(z, activation)
        ctx.save_for_backward(y if activation in _SLOPE_OF_RESULT else z)
        # Not saved with save_for_backward: backward reads no values of it, and the caller may change them, as with
        # F.linear.
        ctx.bias, ctx.activation = bias, activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (z,), bias = ctx.saved_tensors, ctx.bias
        wants_z, wants_bias = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():

            def formula(z: Tensor, bias: Tensor | None) -> Tensor:
                # z includes the value of the bias but not its derivative.
                return activate(z if bias is None else z + (bias - bias.detach()).to(z.dtype), ctx.activation)

            return (*differentiable_gradients(formula, (z, bias), (dy,), (wants_z, wants_bias)), None)
        dz, dbias = activation_gradients(
            dy, z, None, None, None, 0, ctx.activation, 0.0, dy.dtype, bias.dtype if wants_bias else None
        )
        return dz if wants_z else None, dbias if wants_bias else None, None


class _LinearActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        saves_z = activation is not None and activation not in _SLOPE_OF_RESULT
        y: Tensor
        y, z = _forward(x, weight, bias, activation, saves_z)
        ctx.save_for_backward(x, weight, bias, z if saves_z else y if activation is not None else None)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, z = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():

            def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return _formula(x, weight, bias, ctx.activation)

            return (*differentiable_gradients(formula, (x, weight, bias), (dy,), ctx.needs_input_grad[:3]), None)
        dz, dbias = dy, None
        if ctx.activation is not None:
            bias_dtype = bias.dtype if wants_bias else None
            dz, dbias = activation_gradients(dy, z, None, None, None, 0, ctx.activation, 0.0, dy.dtype, bias_dtype)
        elif wants_bias:
            dbias = _as_rows(dy).sum(0)
        dx = dz.matmul(weight) if wants_x else None
        dweight = _as_rows(dz).mT.matmul(_as_rows(x)) if wants_weight else None
        return dx, dweight, dbias if wants_bias else None, None


def _as_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _run_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, saves_z: bool
) -> tuple[Tensor, Tensor]:
    y, z = _empty_results(x, weight, bias, activation, saves_z)
    if not y.numel():
        return y, z
    x_RK, y_RN = _contiguous_rows(_as_rows(x)), _as_rows(y)
    # The kernel reads both layouts of a weight: nn.Linear's, and the transpose of a [K, N] weight.
    transposed = weight.stride(0) == 1 and weight.stride(1) != 1
    if transposed:
        vectors = vector_of(x_RK.shape[1], x_RK.stride(0)), vector_of(y_RN.shape[1], weight.stride(1))
        weight_stride = weight.stride(1) // vectors[1]
    else:
        weight = _contiguous_rows(weight)
        vectors = vector_of(x_RK.shape[1], x_RK.stride(0), weight.stride(0)), vector_of(y_RN.shape[1])
        weight_stride = weight.stride(0) // vectors[0]
    sizes = x_RK.shape[0], weight.shape[0], x_RK.shape[1]
    precision = _precision(x.dtype)
    rows, columns, inner, warps, stages = _tile(sizes, precision, odd=1 in vectors, processors=num_processors(x.device))
    launch(
        _forward_kernel,
        (cdiv(sizes[0], rows) * cdiv(sizes[1], columns),),
        (
            *(x_RK, weight, None if bias is None else bias.contiguous(), y_RN, z if saves_z else None),
            *(sizes[0], sizes[1] // vectors[1], sizes[2] // vectors[0]),
            *(x_RK.stride(0) // vectors[0], weight_stride),
        ),
        (
            *(activation, y.dtype == torch.float32, "tf32" if precision == "tf32" else "ieee"),
            *(transposed, *vectors, rows, columns, inner, _GROUP),
        ),
        num_warps=warps,
        num_stages=stages,
    )
    return y, z


def _contiguous_rows(matrix: Tensor) -> Tensor:
    """Return the matrix with contiguous rows. Unlike `as_rows` it takes rows without elements."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _precision(dtype: torch.dtype) -> str:
    """Return the key of _TILES for a dtype; float32 uses tf32 where torch's settings allow it."""
    if dtype != torch.float32:
        return "16 bits"
    # torch has three settings for tf32; this one reflects the other two. On AMD few GPUs support tf32.
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32" and torch.version.hip is None
    return "tf32" if allowed else "ieee"


def _tile(sizes: tuple[int, int, int], precision: str, *, odd: bool, processors: int) -> tuple[int, int, int, int, int]:
    """Return the tile from _TILES for sizes R, N, K, no larger than needed."""
    large, small, unaligned = _TILES[precision]
    busy = cdiv(sizes[0], large[0]) * cdiv(sizes[1], large[1]) >= processors
    *block, warps, stages = unaligned if odd else large if busy else small
    rows, columns, inner = (
        min(most, max(next_power_of_2(size), _SMALLEST)) for most, size in zip(block, sizes, strict=True)
    )
    # An AMD processor has 64 KiB of shared memory, and Triton keeps one more stage in registers there.
    return rows, columns, inner, warps, stages if torch.version.hip is None else 2


def _empty_results(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, saves_z: bool
) -> tuple[Tensor, Tensor]:
    y = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)
    return y, torch.empty_like(y) if saves_z else x.new_empty(0)


@kernel
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    z_ptr,
    num_rows,
    num_columns,
    num_inner,
    x_stride,
    weight_stride,
    ACTIVATION: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    VECTOR_INNER: tl.constexpr,
    VECTOR_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    GROUP: tl.constexpr,
):
    width, depth = num_columns * VECTOR_COLUMNS, num_inner * VECTOR_INNER
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(width, BLOCK_COLUMNS)
    group = tl.program_id(0) // (GROUP * column_tiles)
    tile = tl.program_id(0) % (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    rows = (group * GROUP + tile % height) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tile // height * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inner = tl.arange(0, BLOCK_INNER)
    in_row = columns < width
    # Rows beyond the end read the last row again and are not stored, so that the loop needs a mask only along `inner`.
    row = tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None]
    x_at = x_ptr + row * x_stride * VECTOR_INNER + inner[None, :]
    if TRANSPOSED:
        weight_step = weight_stride * VECTOR_COLUMNS
        weight_at = weight_ptr + inner.to(tl.int64)[:, None] * weight_step + columns[None, :]
    else:
        weight_step = 1
        column = tl.minimum(columns, width - 1).to(tl.int64)[None, :]
        weight_at = weight_ptr + column * weight_stride * VECTOR_INNER + inner[:, None]
    z = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in tl.range(0, depth, BLOCK_INNER):
        live = inner < depth - start
        x = tl.load(x_at, mask=live[None, :], other=0.0)
        if TRANSPOSED:
            weight = tl.load(weight_at, mask=live[:, None] & in_row[None, :], other=0.0)
        else:
            weight = tl.load(weight_at, mask=live[:, None], other=0.0)
        z = tl.dot(x, weight, z, input_precision=PRECISION)
        x_at += BLOCK_INNER
        weight_at += BLOCK_INNER * weight_step
    if bias_ptr is not None:
        z += tl.load(bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    out = rows.to(tl.int64)[:, None] * width + columns[None, :]
    live_out = (rows < num_rows)[:, None] & in_row[None, :]
    if z_ptr is not None:
        tl.store(z_ptr + out, z.to(z_ptr.dtype.element_ty), mask=live_out)
    y = activate_tile(z, ACTIVATION, EXACT)
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=live_out)


_forward = define(
    "linear_activation(Tensor x, Tensor weight, Tensor? bias, str? activation, bool saves_z) -> (Tensor, Tensor)",
    _run_forward,
    _empty_results,
)
_op = Op("linear_activation", _formula, _beside_cublas)  # for "auto" alone: "triton" is the matmul above
