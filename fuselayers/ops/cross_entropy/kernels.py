"""The kernels of cross_entropy, their launches, and the ops that are registered for them."""

from typing import Any, Final

import torch
from torch import Tensor

from ..cpu import pointer, rows, run
from ..implementations import define, in_cpp
from ..implementations.launch import kernel, launch
from ..implementations.triton_language import libdevice, tl
from ..losses import reduce_losses, row_count
from ..rows import as_rows, cdiv, column_tile, elementwise_plan, next_power_of_2, vector_of

__all__ = ["fused_loss", "fused_loss_gradients"]

_PIECE: Final = 4096
_TILE: Final = 2048
_ELEMENTS_OF_A_WARP: Final = 512
# The losses that the one program of `_reduce_kernel` reads at once.
_REDUCED: Final = 4096


def _launch_loss(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    if in_cpp(logits):
        _check_classes(target, logits.shape[-1], ignore_index)
        target_R = target.reshape(-1).contiguous()
        losses_R = logits.new_empty(len(target_R), dtype=torch.float32)
        sums = logits.new_empty(2, len(target_R), dtype=torch.float32)
        if len(target_R):
            run(
                "cross_entropy_forward",
                *(rows(logits), pointer(target_R), ignore_index, label_smoothing, z_loss),
                *(pointer(losses_R), *map(pointer, sums), len(target_R), logits.shape[-1]),
            )
        counted = row_count(reduction, target, ignore_index)
        # A registered op cannot return None: the count is empty for "sum" and "none".
        count = target.new_empty(0) if counted is None else counted
        return reduce_losses(losses_R.view(target.shape), counted, reduction, dtype), sums, count
    losses = torch.empty(target.shape, dtype=dtype if reduction == "none" else wide, device=logits.device)
    sums = torch.empty(2, target.numel(), dtype=wide, device=logits.device)
    if target.numel():
        logits_RV, target_R = as_rows(logits), target.reshape(-1)
        num_rows, width = logits_RV.shape
        vector = vector_of(width, logits_RV.stride(0))
        block_columns = min(next_power_of_2(max(width, 8)), _PIECE)
        block_rows = max(1, min(_TILE // block_columns, next_power_of_2(num_rows)))
        launch(
            _losses_kernel,
            (cdiv(num_rows, block_rows),),
            (
                *(logits_RV, target_R, losses, sums[0], sums[1], num_rows, width // vector),
                *(logits_RV.stride(0) // vector, target_R.stride(0), ignore_index, label_smoothing, z_loss),
            ),
            (label_smoothing > 0, vector, block_rows, block_columns),
            num_warps=max(4, block_rows * block_columns // _ELEMENTS_OF_A_WARP),
        )
    if reduction == "none":
        return losses, sums, target.new_empty(0)
    loss, count = losses.new_empty((), dtype=dtype), target.new_empty(() if reduction == "mean" else 0)
    target_R = target.reshape(-1)
    launch(
        _reduce_kernel,
        (1,),
        (
            *(losses, target_R, loss, count if reduction == "mean" else None),
            *(target_R.numel(), target_R.stride(0), ignore_index),
        ),
        (_REDUCED,),
        num_warps=_REDUCED // _ELEMENTS_OF_A_WARP,
    )
    return loss, sums, count


def _check_classes(target: Tensor, num_classes: int, ignore_index: int) -> None:
    # The fastest check first: 6, 20 and 30 us for 2048 targets (one core of a Xeon).
    if _in_range(target, num_classes) or _in_range(target.masked_fill(target == ignore_index, 0), num_classes):
        return
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= num_classes))]
    raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


def _in_range(target: Tensor, num_classes: int) -> bool:
    if not target.numel():
        return True
    smallest, largest = target.aminmax()
    return int(smallest) >= 0 and int(largest) < num_classes


def _empty_loss(logits: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, reduction, dtype = options
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (
        logits.new_empty(target.shape if reduction == "none" else (), dtype=dtype),
        logits.new_empty(2, target.numel(), dtype=wide),
        target.new_empty(() if reduction == "mean" else 0),
    )


def _launch_gradients(
    dloss: Tensor,
    count: Tensor | None,
    logits: Tensor,
    target: Tensor,
    sums: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    dlogits = _empty_gradients(dloss, count, logits)
    if not target.numel():
        return dlogits
    if in_cpp(logits):
        dlosses_R = (dloss.float() if count is None else dloss.float() / count).reshape(-1).contiguous()
        target_R = target.reshape(-1).contiguous()
        run(
            "cross_entropy_backward",
            *(pointer(dlosses_R), int(len(dlosses_R) > 1), rows(logits), pointer(target_R), *map(pointer, sums)),
            *(ignore_index, label_smoothing, z_loss, rows(dlogits), len(target_R), logits.shape[-1]),
        )
        return dlogits
    logits_RV, target_R, dloss_R = as_rows(logits), target.reshape(-1), dloss.reshape(-1)
    plan = elementwise_plan(logits.element_size(), *logits_RV.shape, logits_RV.stride(0))
    num_rows, width, logits_stride = plan.sizes
    launch(
        _gradients_kernel,
        plan.grid,
        (
            *(dloss_R, count, logits_RV, target_R, sums[0], sums[1], dlogits, num_rows, width),
            # One incoming gradient is broadcast to all rows.
            *(0 if dloss_R.numel() == 1 else dloss_R.stride(0), logits_stride, target_R.stride(0)),
            *(ignore_index, label_smoothing, z_loss),
        ),
        plan.constants,
    )
    return dlogits


def _empty_gradients(dloss: Tensor, count: Tensor | None, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@kernel
def _losses_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    target_ptr,
    losses_ptr,
    largest_ptr,
    log_total_ptr,
    num_rows,
    num_columns,
    logits_stride,
    target_stride,
    ignore_index,
    label_smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_column = rows < num_rows
    row = rows.to(tl.int64)
    width = num_columns * VECTOR
    target = tl.load(target_ptr + row * target_stride, mask=in_column, other=0)
    used = in_column & (target != ignore_index)
    logits_row = logits_ptr + row * logits_stride * VECTOR
    largest = tl.full((BLOCK_ROWS, 1), float("-inf"), tl.float32)
    shift = tl.zeros((BLOCK_ROWS, 1), tl.float32)
    origin = tl.zeros((BLOCK_ROWS, 1), tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    plain = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in tl.range(0, width, BLOCK_COLUMNS, num_stages=2):
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        live = used[:, None] & (columns < width)[None, :]
        x = tl.load(logits_row[:, None] + columns[None, :], mask=live, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 1)[:, None])
        # If all classes so far are -inf the shift is 0, since -inf - (-inf) is NaN.
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + libdevice.fast_expf(x - shift)
        largest = new
        if SMOOTH:
            # Sums of differences from the first piece's maximum.
            origin = tl.where(first == 0, shift, origin)
            plain += tl.where(live, x - origin, 0.0)
    total, plain = tl.sum(total, 1), tl.sum(plain, 1)
    shift, origin = tl.sum(shift, 1), tl.sum(origin, 1)  # of one column: [BLOCK_ROWS]
    log_total = tl.log(tl.where(used, total, 1.0))
    lse = shift + log_total
    in_range = used & (target >= 0) & (target < width)
    logit = tl.load(logits_row + target, mask=in_range, other=float("nan")).to(tl.float32)
    # See [m and l].
    loss = log_total + (1 - label_smoothing) * (shift - logit) + z_loss * lse * lse
    if SMOOTH:
        loss += label_smoothing * (shift - origin - plain / width)
    tl.store(largest_ptr + row, shift, mask=in_column)
    tl.store(log_total_ptr + row, log_total, mask=in_column)
    tl.store(losses_ptr + row, tl.where(used, loss, 0.0).to(losses_ptr.dtype.element_ty), mask=in_column)


@kernel
def _reduce_kernel(  # type: ignore[no-untyped-def]
    losses_ptr, target_ptr, loss_ptr, count_ptr, num_rows, target_stride, ignore_index, BLOCK_ROWS: tl.constexpr
):
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    used = tl.zeros((BLOCK_ROWS,), tl.int32)
    for first in tl.range(0, num_rows, BLOCK_ROWS, num_stages=2):
        rows = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        live = rows < num_rows
        total += tl.load(losses_ptr + rows, mask=live, other=0.0)
        if count_ptr is not None:
            target = tl.load(target_ptr + rows * target_stride, mask=live, other=0)
            used += (live & (target != ignore_index)).to(tl.int32)
    loss = tl.sum(total, 0)
    if count_ptr is not None:
        count = tl.sum(used.to(tl.int64), 0)
        tl.store(count_ptr, count)
        loss /= count.to(tl.float32)
    tl.store(loss_ptr, loss.to(loss_ptr.dtype.element_ty))


@kernel
def _gradients_kernel(  # type: ignore[no-untyped-def]
    dloss_ptr,
    count_ptr,
    logits_ptr,
    target_ptr,
    largest_ptr,
    log_total_ptr,
    dlogits_ptr,
    num_rows,
    num_columns,
    dloss_stride,
    logits_stride,
    target_stride,
    ignore_index,
    label_smoothing,
    z_loss,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = column_tile() * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    in_column = rows < num_rows
    row = rows.to(tl.int64)
    width = num_columns * VECTOR
    target = tl.load(target_ptr + row * target_stride, mask=in_column, other=0)
    used = in_column & (target != ignore_index)
    shift = tl.load(largest_ptr + row, mask=in_column, other=0.0)
    log_total = tl.load(log_total_ptr + row, mask=in_column, other=0.0)
    scale = tl.load(dloss_ptr + row * dloss_stride, mask=in_column, other=0.0).to(tl.float32)
    if count_ptr is not None:
        scale /= tl.load(count_ptr).to(tl.float32)
    in_range = (target >= 0) & (target < width)
    scale = tl.where(in_range, scale, float("nan"))
    wanted = tl.where(in_range, target, -1).to(tl.int32)  # int32 comparisons are half the work
    of_probability = scale * (1 + 2 * z_loss * (shift + log_total)) * tl.exp(-log_total)
    of_target = scale * (1 - label_smoothing)
    of_all = scale * (label_smoothing / width)
    in_row = (columns < width)[None, :]
    place = logits_ptr + (row * logits_stride * VECTOR)[:, None] + columns[None, :]
    x = tl.load(place, mask=used[:, None] & in_row, other=0.0).to(tl.float32)
    dlogits = tl.exp(x - shift[:, None]) * of_probability[:, None] - of_all[:, None]
    dlogits -= tl.where(columns[None, :] == wanted[:, None], of_target[:, None], 0.0)
    dlogits = tl.where(used[:, None], dlogits, 0.0)
    place = dlogits_ptr + (row * width)[:, None] + columns[None, :]
    tl.store(place, dlogits.to(dlogits_ptr.dtype.element_ty), mask=in_column[:, None] & in_row)


fused_loss = define(
    "cross_entropy_forward(Tensor logits, Tensor target, int ignore_index, float label_smoothing, float z_loss, "
    "str reduction, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _launch_loss,
    _empty_loss,
)
fused_loss_gradients = define(
    "cross_entropy_backward(Tensor dloss, Tensor? count, Tensor logits, Tensor target, Tensor sums, int ignore_index, "
    "float label_smoothing, float z_loss) -> Tensor",
    _launch_gradients,
    _empty_gradients,
)
