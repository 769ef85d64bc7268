"""bias_dropout_residual -- y = dropout(x + bias, p) + residual: how a sublayer's output joins the residual stream.

    x, residual, y   [..., N]   any float dtype
    bias             [N]        optional
    seed             []         int64

    forward    y         = (x + bias) * keep * scale + residual
    backward   dx        = dy * keep * scale
               dbias     = dx summed over every dimension but the last
               dresidual = dy

Saved for backward: a seed (see dropout). Dtypes promote as in torch's own sums.

Floor, in elements of x: 3 forward (read x and residual, write y), 2 backward (read dy, write dx; dresidual is dy
itself), none backward where nothing is dropped and there is no bias. The kernels move that, and the bias once per
program.
"""

from typing import Any

import torch
from torch import Tensor

from .bias_activation_dropout import gradients_of_dropped
from .dropout import dropout, dropout_reference, dropped
from .forms import define, needs_grad, takes_kernels
from .launch import kernel, launch
from .philox import check_probability, check_seed, keep_scale, keep_threshold, keep_tile, seed_for
from .rows import as_rows, cdiv, tile, vector_of
from .shapes import check_like, check_row_vector, check_rows
from .triton_language import tl

__all__ = ["bias_dropout_residual", "bias_dropout_residual_reference"]


def bias_dropout_residual(
    x: Tensor,
    residual: Tensor,
    *,
    bias: Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return dropout(x + bias, p) + residual.

    Args:
        x: [..., N], the sublayer's output, any float dtype.
        residual: [..., N], the stream it joins.
        bias: [N], or None for no bias.
        p: dropout probability, 0 <= p < 1.
        training: False leaves the dropout out.
        seed: int64 tensor of shape [] on x's device, which fixes the mask; drawn from torch's generator when None.
        backend: "auto", "eager" for the formula, or "triton" for the kernels, inside a compiled function too.

    Raises:
        ValueError: x has no dimension, the residual, the bias or the seed does not fit it, p is outside [0, 1), or the
            backend is unknown.
        TypeError: a tensor is not floating, the seed is not a tensor, or p is one.
        RuntimeError: without a seed, inside a `torch.vmap` whose `randomness` is "error", which is its default; or
            "triton" was asked for and cannot take the call.

    >>> import torch
    >>> bias_dropout_residual(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0]), bias=torch.tensor([0.5, 0.5]))
    tensor([11.5000, 12.5000])
    """
    check_rows("x", x)
    check_like("residual", residual, x)
    check_row_vector("bias", bias, x)
    check_probability(p)
    check_seed(seed, x.device)
    seed = seed_for(p, training=training, seed=seed, device=x.device)
    if takes_kernels(backend, x, residual, bias):
        run = _Kernels.apply if needs_grad(x, residual, bias) else _forward
        y: Tensor = run(x, residual, bias, seed, p)
        return y
    z = x if bias is None else x + bias
    return (z if seed is None else dropout(z, p, seed=seed)) + residual


def bias_dropout_residual_reference(
    x: Tensor, residual: Tensor, *, bias: Tensor | None = None, p: float = 0.0, seed: Tensor | None = None
) -> Tensor:
    """What the op means in training, in plain torch; without a seed nothing is dropped."""
    z = x if bias is None else x + bias
    return (z if seed is None else dropout_reference(z, p, seed=seed)) + residual


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, bias: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.options = p, x.dtype, residual.dtype, None if bias is None else bias.dtype
        y: Tensor = _forward(x, residual, bias, seed, p)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        p, x_dtype, residual_dtype, bias_dtype = ctx.options
        wants_x, wants_residual, wants_bias = ctx.needs_input_grad[:3]
        dx = dbias = None
        if torch.is_grad_enabled():  # linear: its derivative is the op of which autograd knows the next one
            dz = dy if seed is None else dropout(dy, p, seed=seed)
            dx, dbias = dz.to(x_dtype), dz.flatten(0, -2).sum(0) if dz.dim() > 1 else dz
            dbias = dbias.to(bias_dtype) if wants_bias else None
        elif wants_bias:
            dx, dbias = gradients_of_dropped(dy, None, None, seed, None, p, x_dtype, bias_dtype)
        elif wants_x:
            dx = (dy if seed is None else dropped(dy, seed, p)).to(x_dtype)
        return dx if wants_x else None, dy.to(residual_dtype) if wants_residual else None, dbias, None, None


def _run_forward(x: Tensor, residual: Tensor, bias: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
    y = _like_result(x, residual, bias, seed, p)
    if not y.numel():
        return y
    x_RN, residual_RN = as_rows(x), as_rows(residual)
    y_RN = y.view(x_RN.shape)
    vector = vector_of(x_RN, residual_RN, y_RN)
    block_rows, block_columns = tile(x_RN)
    launch(
        _forward_kernel,
        (cdiv(x_RN.shape[0], block_rows), cdiv(x_RN.shape[1], block_columns)),
        (
            *(x_RN, residual_RN, None if bias is None else bias.contiguous(), y_RN, seed),
            *(x_RN.shape[0], x_RN.shape[1] // vector, x_RN.stride(0) // vector, residual_RN.stride(0) // vector),
            *(keep_threshold(p), keep_scale(p)),
        ),
        (vector, block_rows, block_columns),
    )
    return y


def _like_result(x: Tensor, residual: Tensor, bias: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, residual.dtype)
    dtype = dtype if bias is None else torch.promote_types(dtype, bias.dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@kernel
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    bias_ptr,
    y_ptr,
    seed_ptr,
    num_rows,
    num_columns,
    x_stride,
    residual_stride,
    threshold,
    scale,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first_column = tl.program_id(1) * BLOCK_COLUMNS
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    in_row = columns < num_columns * VECTOR
    live = (rows < num_rows)[:, None] & in_row[None, :]
    row = rows.to(tl.int64)[:, None]
    z = tl.load(x_ptr + row * (x_stride * VECTOR) + columns[None, :], mask=live, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * (residual_stride * VECTOR) + columns[None, :], mask=live, other=0.0)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if seed_ptr is not None:
        keep = keep_tile(seed_ptr, rows, first_column, threshold, BLOCK_ROWS, BLOCK_COLUMNS)
        z *= tl.where(keep, scale, 0.0)
    y = z + residual.to(tl.float32)
    tl.store(y_ptr + row * (num_columns * VECTOR) + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=live)


_forward = define(
    "bias_dropout_residual(Tensor x, Tensor residual, Tensor? bias, Tensor? seed, float p) -> Tensor",
    _run_forward,
    _like_result,
)
