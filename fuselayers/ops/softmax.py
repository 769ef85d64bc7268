"""softmax -- y = softmax(scale * scores) over the last dimension, without what a mask or causality hides.

    scores, y   [..., T, S]   any float dtype; T queries, S keys (without causality [..., S])
    mask        bool, broadcastable to scores' shape: True takes part, as in torch's scaled_dot_product_attention

    forward    e = exp(scale * scores - max),   y = e / sum(e)     max and sum over visible positions
    backward   dscores = scale * y * (dy - sum(dy * y) / sum(y))

Causal: query t sees keys 0..t, for any T and S. That is `torch.ones(T, S).tril()`, aligned top left, as torch's
scaled_dot_product_attention documents its `is_causal`. Queries at the end of longer keys need a mask:
`torch.ones(T, S, dtype=torch.bool).tril(S - T)`.

Hidden positions are 0 and have no influence: a NaN there changes nothing. A row without visible positions is 0, and so
is its gradient; torch.softmax would give NaN. Visible positions behave as in torch.softmax: with NaN or inf among them,
or with only -inf, all of them become NaN.

The arithmetic is float32 (float64 where scores are), scale and mask included; y is rounded once, to scores' dtype.

Note: [sum(y)] It is 1, but for the rounding of y. Dividing by it makes the gradient a sum of differences within dy.
Without it, a row with one large weight would lose its gradient in 16 bits: y * (dy - sum(dy * y)) would be the
difference of nearly equal numbers.

Saved for backward: y, neither scores nor mask. The eager formula saves the softmax in float32 at least, and the mask,
one byte per element.

Bytes moved, in elements of y: 2 forward (read scores, write y) and the bytes of the mask, 3 backward (read dy and y,
write dscores). The kernels reach that for rows of up to 8192 elements, which one program holds in registers; they do
not read scores above the diagonal. Longer rows are split: scores and mask, or dy and y, are read twice.

The online sum of long rows: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor

from .implementations import define, run
from .implementations.launch import kernel, launch
from .implementations.triton_language import libdevice, tile_function, tl
from .rows import as_rows, cdiv, tile_of_rows, vector_of
from .shapes import check_dense, check_rows

__all__ = ["softmax", "softmax_reference"]

_MASK_LEVELS: Final = 3


def softmax(
    scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0, backend: str = "auto"
) -> Tensor:
    """Return softmax(scale * scores) over the last dimension, of scores' shape and dtype.

    A row without visible positions is 0, with gradient 0. A hidden position is 0.

    Args:
        scores: [..., S], or [..., T, S] if causal; any float dtype.
        mask: bool, broadcastable to scores' shape; True is visible. The kernels read it through its strides, for any
            broadcast ([S], [T, S], [B, 1, 1, S], [B, H, T, S], ...). They copy it only if its leading dimensions need
            more than three strides.
        causal: query t sees keys 0..t: aligned top left, for any T and S. With a mask, both apply.
        scale: a finite factor of the scores, applied in float32.
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: scores have no dimension, or fewer than two if causal; the mask does not fit scores or is on another
            device; scale is not finite; or the backend is unknown.
        TypeError: scores are not dense and floating, the mask is not bool, or scale is no number.
        RuntimeError: the requested backend cannot take the call.

    >>> import torch
    >>> softmax(torch.zeros(3, 3), torch.tensor([True, True, False]), causal=True)
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.5000, 0.5000, 0.0000]])
    """
    check_rows("scores", scores)
    _check_mask(mask, scores)
    _check_scale(scale)
    if causal and scores.dim() < 2:
        raise ValueError(
            f"causal scores must be [..., T, S], queries by keys, got {list(scores.shape)}; leave causal=False"
        )
    y: Tensor = run(backend, _formula, _Softmax.apply, (scores, mask), (causal, scale))
    return y


def _check_mask(mask: Tensor | None, scores: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a bool tensor or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor, True where a score takes part, got {mask.dtype}")
    check_dense("mask", mask)
    sizes = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    if mask.dim() > scores.dim() or not all(size in (1, wanted) for size, wanted in sizes):
        raise ValueError(f"mask must be broadcastable to scores' shape {list(scores.shape)}, got {list(mask.shape)}")
    if mask.device != scores.device:
        raise ValueError(
            f"mask must be on scores' device {scores.device}, got {mask.device}; move it with .to(scores.device)"
        )


def _check_scale(scale: float) -> None:
    if not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"scale must be a finite number, got {type(scale).__name__}; pass a float")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite number, got {scale}")


def _formula(scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    visible = _visible(scores, mask, causal)
    if visible is None and scale == 1:
        y = scores.softmax(-1)  # computes in float32 at least, and rounds once
        return y if y.dtype == scores.dtype else y.to(scores.dtype)
    wide = scores if scores.dtype.itemsize > 2 else scores.float()
    wide = wide if scale == 1 else wide * scale
    if visible is None:
        return wide.softmax(-1).to(scores.dtype)
    hidden_value = torch.full((), -math.inf, dtype=wide.dtype, device=wide.device)
    if mask is not None:
        # A row without visible positions is filled with 0: only -inf would give NaN within, in backward too, which
        # anomaly detection reports. On a CPU any() of bytes takes a tenth of the time of bools; they are converted,
        # since torch 2.11's Inductor cannot view bools as bytes.
        hidden_value = torch.where(visible.to(torch.uint8).any(-1, keepdim=True).bool(), hidden_value, 0.0)
    return torch.where(visible, torch.where(visible, wide, hidden_value).softmax(-1), 0.0).to(scores.dtype)


def _visible(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    if not causal:
        return mask
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    return visible if mask is None else visible & mask


def softmax_reference(
    scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0
) -> Tensor:
    """The definition of the op, in plain torch."""
    visible = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    visible = visible if mask is None else visible & mask
    visible = visible.tril() if causal else visible
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    return wide.masked_fill(~visible, -math.inf).softmax(-1).masked_fill(~visible, 0.0).to(scores.dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        y: Tensor = _forward(scores, mask, causal, scale)
        ctx.save_for_backward(y)
        ctx.options = causal, scale
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        # The formula is differentiable again: y is an output, so autograd continues from it to scores.
        dscores = (_gradient_formula if torch.is_grad_enabled() else _backward)(dy, y, *ctx.options)
        return dscores, None, None, None


def _gradient_formula(dy: Tensor, y: Tensor, causal: bool, scale: float) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    wide_dy, wide_y = dy.to(wide).masked_fill(y == 0, 0.0), y.to(wide)
    total = wide_y.sum(-1, keepdim=True)
    mean = (wide_dy * wide_y).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0)
    dscores = scale * wide_y * (wide_dy - mean)
    return dscores.masked_fill(y == 0, 0.0).to(y.dtype)


def _launch_forward(scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    y = _empty_result(scores, mask, causal, scale)
    if not y.numel():
        return y
    scores_RN = as_rows(scores)
    vector = vector_of(scores_RN.shape[1], scores_RN.stride(0))
    sizes, strides, column_stride = (1, 1), (0, 0, 0), 0
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
        (causal, column_stride == 1, mask_vector, vector, block_rows, block_columns),
        num_warps=num_warps,
    )
    return y


def _empty_result(scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
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


def _launch_backward(dy: Tensor, y: Tensor, causal: bool, scale: float) -> Tensor:
    dscores = _empty_gradient(dy, y, causal, scale)
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
        (causal, vector, block_rows, block_columns),
        num_warps=num_warps,
    )
    return dscores


def _empty_gradient(dy: Tensor, y: Tensor, causal: bool, scale: float) -> Tensor:
    return torch.empty(y.shape, dtype=y.dtype, device=y.device)


@tile_function
def _loaded_tile(columns, last, live, CAUSAL: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the loaded part of a tile: up to each row's last column, rounded up to whole vectors."""
    loaded = live
    if CAUSAL:
        loaded = loaded & ((columns // VECTOR)[None, :] <= (last // VECTOR)[:, None])
    return loaded


@tile_function
def _visible_tile(  # type: ignore[no-untyped-def]
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
    CAUSAL: tl.constexpr,
    ADJACENT: tl.constexpr,
    MASK_VECTOR: tl.constexpr,
):
    """Return the visible part of a tile."""
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
        visible = visible & tl.load(mask_ptr + offset, mask=loaded, other=0)
    return visible


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
    CAUSAL: tl.constexpr,
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
    loaded = _loaded_tile(columns, last, live, CAUSAL, VECTOR)
    row = rows.to(tl.int64)[:, None]
    scores = tl.load(scores_ptr + row * scores_stride * VECTOR + columns[None, :], mask=loaded, other=0.0)
    visible = _visible_tile(
        *(mask_ptr, rows, columns, last, loaded, num_middle, num_inner, outer_stride, middle_stride, inner_stride),
        *(column_stride, CAUSAL, ADJACENT, MASK_VECTOR),
    )
    z = tl.where(visible, scores.to(tl.float32) * scale, float("-inf"))
    e = libdevice.fast_expf(z - tl.max(z, 1)[:, None])
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
    CAUSAL: tl.constexpr,
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
        loaded = _loaded_tile(columns, last, (columns < width)[None, :], CAUSAL, VECTOR)
        scores = tl.load(scores_row + columns[None, :], mask=loaded, other=0.0)
        visible = _visible_tile(
            *(mask_ptr, rows, columns, last, loaded, num_middle, num_inner, outer_stride, middle_stride),
            *(inner_stride, column_stride, CAUSAL, ADJACENT, MASK_VECTOR),
        )
        z = tl.where(visible, scores.to(tl.float32) * scale, float("-inf"))
        # One of exp(largest - new) and exp(z - new) is exp(0).
        less = libdevice.fast_expf(-tl.abs(z - largest))
        total = tl.where(z > largest, total * less + 1.0, total + less)
        largest = tl.where(z > largest, z, largest)
    most = tl.max(largest, 1)[:, None]
    inverse = 1.0 / tl.sum(total * libdevice.fast_expf(largest - most), 1)[:, None]
    for first in tl.range(0, width, BLOCK_COLUMNS, num_stages=2):
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        live = (columns < width)[None, :]
        loaded = _loaded_tile(columns, last, live, CAUSAL, VECTOR)
        scores = tl.load(scores_row + columns[None, :], mask=loaded, other=0.0)
        visible = _visible_tile(
            *(mask_ptr, rows, columns, last, loaded, num_middle, num_inner, outer_stride, middle_stride),
            *(inner_stride, column_stride, CAUSAL, ADJACENT, MASK_VECTOR),
        )
        y = tl.where(visible, libdevice.fast_expf(scores.to(tl.float32) * scale - most) * inverse, 0.0)
        tl.store(y_ptr + row * width + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=live)


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
    CAUSAL: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    width = num_columns * VECTOR
    live = (rows < num_rows)[:, None] & (columns < width)[None, :]
    loaded = _loaded_tile(columns, rows % num_queries, live, CAUSAL, VECTOR)
    row = rows.to(tl.int64)[:, None]
    dy = tl.load(dy_ptr + row * dy_stride * VECTOR + columns[None, :], mask=loaded, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride * VECTOR + columns[None, :], mask=loaded, other=0.0).to(tl.float32)
    # Hidden positions contribute nothing, even if their dy is infinite or another position is NaN.
    mean = (tl.sum(tl.where(y == 0.0, 0.0, dy * y), 1) / tl.sum(y, 1))[:, None]
    dscores = tl.where(y == 0.0, 0.0, scale * y * (dy - mean))
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
    products = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    weights = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in tl.range(0, end, BLOCK_COLUMNS, num_stages=2):
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        loaded = _loaded_tile(columns, last, (columns < width)[None, :], CAUSAL, VECTOR)
        dy = tl.load(dy_row + columns[None, :], mask=loaded, other=0.0).to(tl.float32)
        y = tl.load(y_row + columns[None, :], mask=loaded, other=0.0).to(tl.float32)
        products += tl.where(y == 0.0, 0.0, dy * y)  # see _backward_kernel
        weights += y
    mean = (tl.sum(products, 1) / tl.sum(weights, 1))[:, None]
    for first in tl.range(0, width, BLOCK_COLUMNS, num_stages=2):
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        live = (columns < width)[None, :]
        loaded = _loaded_tile(columns, last, live, CAUSAL, VECTOR)
        dy = tl.load(dy_row + columns[None, :], mask=loaded, other=0.0).to(tl.float32)
        y = tl.load(y_row + columns[None, :], mask=loaded, other=0.0).to(tl.float32)
        dscores = tl.where(y == 0.0, 0.0, scale * y * (dy - mean))
        tl.store(dscores_ptr + row * width + columns[None, :], dscores.to(dscores_ptr.dtype.element_ty), mask=live)


_forward = define(
    "softmax(Tensor scores, Tensor? mask, bool causal, float scale) -> Tensor",
    _launch_forward,
    _empty_result,
    formula=_formula,
)
_backward = define(
    "softmax_backward(Tensor dy, Tensor y, bool causal, float scale) -> Tensor",
    _launch_backward,
    _empty_gradient,
    formula=_gradient_formula,
)
