"""cross_entropy -- the loss of a row: -log softmax(logits)[target], smoothed, with a z-loss, then reduce_losses.

    logits   [..., V]   any float dtype; V classes
    target   [...]      int64, in [0, V) or ignore_index
    m, l     [R]        float32; R rows
    a, z                label_smoothing, z_loss

    forward    m      = max_j(logits_j),  l = log(sum_j exp(logits_j - m)),  lse = m + l
               loss   = l + (1 - a) * (m - logits_target) + a * (m - mean_j(logits_j)) + z * lse^2
    backward   dlogits_j = dloss * (exp(logits_j - m) exp(-l) (1 + 2 * z * lse) - (1 - a) * [j = target] - a / V)

Note: [m and l] They stay separate, and nothing is subtracted from lse. If a common offset moves all logits far from 0,
the rounding of lse is as large as the loss of a well predicted row, and a probability exp(logits_j - lse) would have
that error. The difference of a logit and the largest one is exact.

The loss of a row whose target is ignore_index is 0, and so is its gradient. "mean" divides by the number of the other
rows, on the device, without synchronisation. The arithmetic is float32 at least, rounded once.

Saved for backward: logits, target, m and l (for "mean" the number of rows too), never a softmax; backward does not
overwrite them. The eager formula saves log_softmax(logits), in float32 at least, and with a z-loss the logits too.

Bytes moved by the kernels, in elements of logits: 1 forward (read logits), 2 backward (read logits, write dlogits).
They skip ignored rows. Rows are read in pieces of 4096 with a running maximum, for any V, each while the one before is
computed; short rows share a program. Another kernel of one program adds the losses and counts the rows.

Note: [targets out of range] On the CPU a call raises an IndexError, as torch does. Kernels cannot raise without a
synchronisation: there the loss and the gradient of such a row are NaN, and no memory outside of the row is read.

Label smoothing: Szegedy et al., "Rethinking the Inception architecture", 2015. z-loss: Chowdhery et al., "PaLM", 2022,
section 5. The running maximum: Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from .implementations import define, differentiable_gradients, needs_grad, run
from .implementations.launch import INTERPRETED, kernel, launch
from .implementations.triton_language import libdevice, tile_function, tl
from .losses import check_loss_options, check_target, loss_dtype, reduce_losses, row_count
from .rows import as_rows, cdiv, column_tile, elementwise_plan, next_power_of_2, vector_of
from .shapes import check_rows

__all__ = ["cross_entropy", "cross_entropy_reference", "fused_loss", "fused_loss_gradients"]

# Elements from which the compiled implementation is faster: torch has one kernel for all but the mean.
_COMPILED_FROM: Final = 1 << 20
_PIECE: Final = 4096
_TILE: Final = 2048
_ELEMENTS_OF_A_WARP: Final = 512
# The losses that the one program of `_reduce_kernel` reads at once.
_REDUCED: Final = 4096
# Narrower rows are too short to gain. 8192x50257 bfloat16 takes 201 us instead of 233, 591 instead of 621 with backward
# (by the roofline of lint-kernels, sm_90; not measured).
_PEELED_FROM: Final = 2048


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    backend: str = "auto",
) -> Tensor:
    """Return the cross entropy of logits with class indices.

    The loss has the logits' dtype; under autocast it is float32 at least, as in `torch.nn.functional.cross_entropy`.

    Args:
        logits: [..., V], any float dtype. Classes come last; in torch's own function they come second.
        target: [...], int64: classes in [0, V), or ignore_index.
        ignore_index: rows with this target are ignored.
        label_smoothing: between 0 and 1, the share of the target spread evenly over all classes.
        z_loss: times logsumexp(logits)^2 is added to a row's loss, which keeps the logits from drifting; 1e-4 in PaLM.
        reduction: "mean" over the rows that are not ignored (NaN if there are none), "sum", or "none" for [...].
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: logits have no dimension or no class, target does not fit them, label_smoothing or z_loss is out of
            range, or the reduction or the backend is unknown.
        TypeError: logits are not dense and floating, target is not int64, or an option is no number.
        IndexError: a target is out of range; the kernels give NaN instead.
        RuntimeError: the requested backend cannot take the call.

    >>> import torch
    >>> cross_entropy(torch.tensor([[0.0, 0.0], [0.0, 50.0]]), torch.tensor([1, -100])).round(decimals=4)
    tensor(0.6931)
    """
    options = ignore_index, label_smoothing, z_loss, reduction
    check_rows("logits", logits)
    if not logits.shape[-1]:
        raise ValueError(f"logits must have at least one class, got {list(logits.shape)}")
    check_target(target, "logits", logits)
    check_loss_options(ignore_index, label_smoothing, z_loss, reduction)
    loss: Tensor = run(backend, _formula, _fused, (logits, target), options, compiled_from=_COMPILED_FROM)
    return loss


def _formula(logits: Tensor, target: Tensor, *options: Any) -> Tensor:
    return _loss_by_formula(logits, target, *(*options, loss_dtype(logits.dtype, logits.device)))


def _loss_by_formula(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    logits_RV, target_R = logits.flatten(0, -2) if logits.dim() > 1 else logits[None], target.flatten()
    if not label_smoothing and not z_loss and reduction != "none":
        wide_RV = logits_RV if logits_RV.dtype.itemsize > 2 else logits_RV.float()
        loss = F.cross_entropy(wide_RV, target_R, ignore_index=ignore_index, reduction=reduction)
        return loss if loss.dtype == dtype else loss.to(dtype)
    losses = _losses_by_formula(logits_RV, target_R, ignore_index, label_smoothing, z_loss)
    return reduce_losses(losses.reshape(target.shape), row_count(reduction, target, ignore_index), reduction, dtype)


def _losses_by_formula(
    logits_RV: Tensor, target_R: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    """Return the losses of rows, in float32 at least. On the CPU it raises an IndexError for a target out of range."""
    log_probabilities_RV = logits_RV.log_softmax(-1, torch.promote_types(logits_RV.dtype, torch.float32))
    losses_R = F.nll_loss(log_probabilities_RV, target_R, ignore_index=ignore_index, reduction="none")
    if label_smoothing:
        even_R = -log_probabilities_RV.mean(-1).masked_fill(target_R == ignore_index, 0.0)
        losses_R = (1 - label_smoothing) * losses_R + label_smoothing * even_R
    if z_loss:
        lse_R = logits_RV.to(log_probabilities_RV.dtype).logsumexp(-1)
        losses_R = losses_R + z_loss * lse_R.masked_fill(target_R == ignore_index, 0.0).square()
    return losses_R


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The definition of the op, in plain torch: the target is a row of probabilities."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = wide.logsumexp(-1, keepdim=True)
    used = target != ignore_index
    classes = torch.arange(logits.shape[-1], device=logits.device)
    wanted = (classes == target[..., None]).to(wide) * (1 - label_smoothing) + label_smoothing / logits.shape[-1]
    losses = torch.where(used, (wanted * (lse - wide)).sum(-1) + z_loss * lse[..., 0].square(), 0.0)
    if reduction != "none":
        losses = losses.sum()
    return (losses / used.sum() if reduction == "mean" else losses).to(logits.dtype)


def _fused(logits: Tensor, target: Tensor, *options: Any) -> Tensor:
    options = *options, loss_dtype(logits.dtype, logits.device)
    if logits.device.type == "cpu" and not INTERPRETED:
        _check_classes(target, logits.shape[-1], options[0])
    recorded = needs_grad(logits)
    call = logits, target, *options
    loss: Tensor = _CrossEntropy.apply(*call) if recorded else fused_loss(*call)[0]  # type: ignore[no-untyped-call]
    return loss


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


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, *options: Any) -> Tensor:
        loss: Tensor
        loss, sums, count = fused_loss(logits, target, *options)
        ctx.save_for_backward(logits, target, sums, count if count.numel() else None)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, sums, count = ctx.saved_tensors
        if torch.is_grad_enabled():

            def formula(logits: Tensor) -> Tensor:
                return _loss_by_formula(logits, target, *ctx.options)

            (dlogits,) = differentiable_gradients(formula, (logits,), (dloss,), (True,))
        else:
            dlogits = fused_loss_gradients(dloss, count, logits, target, sums, *ctx.options[:3])
        return dlogits, None, *(None for _ in ctx.options)


def _loss_formula(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, m and l as [2, R], and the divisor of the loss (empty if there is none)."""
    logits_RV, column_R1, used_R1 = _wide_rows(logits, target, ignore_index)
    largest_R = logits_RV.amax(-1)
    log_total_R = (logits_RV - largest_R[:, None]).exp().sum(-1).log()
    losses_R = log_total_R + (1 - label_smoothing) * (largest_R - logits_RV.gather(-1, column_R1)[:, 0])
    losses_R = losses_R + z_loss * (largest_R + log_total_R).square()
    if label_smoothing:
        losses_R = losses_R + label_smoothing * (largest_R[:, None] - logits_RV).mean(-1)
    losses_R = torch.where(used_R1[:, 0], losses_R, 0.0)
    if reduction != "none":
        # Inductor's C++ adds sequentially: for equal losses, float32 rounding would accumulate in one direction.
        losses_R = losses_R.double()
    sums = torch.stack((largest_R, log_total_R))
    return _reduced_with_count(losses_R.view(target.shape), sums, target, ignore_index, reduction, dtype)


def _reduced_with_count(
    losses: Tensor, sums: Tensor, target: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the op's results. A registered op cannot return None: the count is empty for "sum" and "none"."""
    count = row_count(reduction, target, ignore_index)
    loss = reduce_losses(losses, count, reduction, dtype)
    return loss, sums, target.new_empty(0) if count is None else count


def _gradients_formula(
    dloss: Tensor,
    count: Tensor | None,
    logits: Tensor,
    target: Tensor,
    sums: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    logits_RV, column_R1, used_R1 = _wide_rows(logits, target, ignore_index)
    largest_R1, log_total_R1, dloss_R1 = sums[0, :, None], sums[1, :, None], dloss.reshape(-1, 1).to(logits_RV.dtype)
    dloss_R1 = dloss_R1 if count is None else dloss_R1 / count
    of_probability_R1 = (1 + 2 * z_loss * (largest_R1 + log_total_R1)) * (-log_total_R1).exp()

    def gradients(logits: Tensor, wanted: float) -> Tensor:
        dlogits = dloss_R1 * ((logits - largest_R1).exp() * of_probability_R1 - wanted)
        return torch.where(used_R1, dlogits, 0.0)

    # All classes first, then a scatter of the target's. A comparison of each class with the target takes 1.5 ms instead
    # of 1.2 for backward of 2048x1024 float32 (two cores of a Xeon, AVX-512).
    of_all = label_smoothing / logits.shape[-1]
    dtarget_R1 = gradients(logits_RV.gather(-1, column_R1), of_all + (1 - label_smoothing))
    dlogits_RV = gradients(logits_RV, of_all).to(logits.dtype)
    return dlogits_RV.scatter(-1, column_R1, dtarget_R1.to(logits.dtype)).view(logits.shape)


def _wide_rows(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits as rows, in float32 at least; each row's target column; and the mask of rows not ignored."""
    logits_RV, target_R1 = logits.reshape(-1, logits.shape[-1]), target.reshape(-1, 1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    # The clamp gives ignored rows a valid column. `_check_classes` has checked the others: compiled code cannot raise
    # from OpenMP threads.
    return logits_RV.to(wide), target_R1.clamp(0, logits.shape[-1] - 1), target_R1 != ignore_index


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
    losses = torch.empty(target.shape, dtype=dtype if reduction == "none" else wide, device=logits.device)
    sums = torch.empty(2, target.numel(), dtype=wide, device=logits.device)
    if target.numel():
        logits_RV, target_R = as_rows(logits), target.reshape(-1)
        num_rows, width = logits_RV.shape
        vector = vector_of(width, logits_RV.stride(0))
        peel = vector == 1 and _peels(logits_RV)
        block_columns = min(next_power_of_2(max(width, 8)), _PIECE)
        block_rows = max(1, min(_TILE // block_columns, next_power_of_2(num_rows)))
        launch(
            _losses_kernel,
            (cdiv(num_rows, block_rows),),
            (
                *(logits_RV, target_R, losses, sums[0], sums[1], num_rows, width // vector),
                *(logits_RV.stride(0) // vector, target_R.stride(0), ignore_index, label_smoothing, z_loss),
            ),
            (label_smoothing > 0, peel, vector, block_rows, block_columns),
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


def _peels(logits_RV: Tensor) -> bool:
    """Return whether the kernels take the ends of rows of an odd width apart; see [the ends of a row]."""
    return logits_RV.shape[1] >= _PEELED_FROM and not logits_RV.data_ptr() % 16


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
    logits_RV, target_R, dloss_R = as_rows(logits), target.reshape(-1), dloss.reshape(-1)
    plan = elementwise_plan(logits.element_size(), *logits_RV.shape, logits_RV.stride(0))
    num_rows, width, logits_stride = plan.sizes
    # The rows of dlogits must begin as those of the logits do.
    peel = logits_stride == width and plan.constants[0] == 1 and _peels(logits_RV)
    launch(
        _gradients_kernel,
        plan.grid,
        (
            *(dloss_R, count, logits_RV, target_R, sums[0], sums[1], dlogits, num_rows, width),
            # One incoming gradient is broadcast to all rows.
            *(0 if dloss_R.numel() == 1 else dloss_R.stride(0), logits_stride, target_R.stride(0)),
            *(ignore_index, label_smoothing, z_loss),
        ),
        (peel, *plan.constants),
    )
    return dlogits


def _empty_gradients(dloss: Tensor, count: Tensor | None, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@tile_function
def _middle(start, width, PEEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where the middles of rows begin in memory, how far after the row's start, and their lengths.

    Note: [the ends of a row] Rows of an odd width begin anywhere, and a thread moves eight neighbours at once from
    multiples of eight only. The up to seven elements before the first and after the last are moved one by one.
    """
    begin = start
    if PEEL:
        begin = (start + 7) // 8 * 8
    head = (begin - start).to(tl.int32)
    length = head + width
    if PEEL:
        length = (width - head) // 8 * 8
    return begin, head, length


@tile_function
def _ends(head, length, width):  # type: ignore[no-untyped-def]
    """Return the columns of both ends of rows, and which of them exist: [R, 16]."""
    place = tl.arange(0, 16)[None, :]
    columns = tl.where(place < 8, place, head[:, None] + length[:, None] + place - 8)
    return columns, tl.where(place < 8, place < head[:, None], columns < width)


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
    PEEL: tl.constexpr,
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
    start = row * logits_stride * VECTOR
    logits_row = logits_ptr + start
    begin, head, length = _middle(start, width, PEEL)
    middle = logits_ptr + begin
    largest = tl.full((BLOCK_ROWS, 1), float("-inf"), tl.float32)
    shift = tl.zeros((BLOCK_ROWS, 1), tl.float32)
    origin = tl.zeros((BLOCK_ROWS, 1), tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    plain = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in tl.range(0, width, BLOCK_COLUMNS, num_stages=2):
        columns = first + tl.arange(0, BLOCK_COLUMNS)
        live = used[:, None] & (columns[None, :] < length[:, None])
        x = tl.load(middle[:, None] + columns[None, :], mask=live, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 1)[:, None])
        # If all classes so far are -inf the shift is 0, since -inf - (-inf) is NaN.
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + libdevice.fast_expf(x - shift)
        largest = new
        if SMOOTH:
            # Sums of differences from the first piece's maximum.
            origin = tl.where(first == 0, shift, origin)
            plain += tl.where(live, x - origin, 0.0)
    total = tl.sum(total, 1)[:, None]
    plain = tl.sum(plain, 1)
    if PEEL:
        ends, live = _ends(head, length, width)
        live = live & used[:, None]
        x = tl.load(logits_row[:, None] + ends, mask=live, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 1)[:, None])
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + tl.sum(libdevice.fast_expf(x - shift), 1)[:, None]
        plain += tl.sum(tl.where(live, x - origin, 0.0), 1)
    shift, origin, total = tl.sum(shift, 1), tl.sum(origin, 1), tl.sum(total, 1)  # of one column: [BLOCK_ROWS]
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


@tile_function
def _gradient_tile(x, is_target, used, shift, of_probability, of_target, of_all):  # type: ignore[no-untyped-def]
    dlogits = tl.exp(x - shift[:, None]) * of_probability[:, None] - of_all[:, None]
    dlogits -= tl.where(is_target, of_target[:, None], 0.0)
    return tl.where(used[:, None], dlogits, 0.0)


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
    PEEL: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first_column = column_tile() * BLOCK_COLUMNS
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
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
    start = row * logits_stride * VECTOR
    out = row * width
    begin, head, length = _middle(start, width, PEEL)
    in_row = columns[None, :] < length[:, None]
    x = tl.load(logits_ptr + begin[:, None] + columns[None, :], mask=used[:, None] & in_row, other=0.0).to(tl.float32)
    is_target = columns[None, :] == (wanted - head)[:, None]
    dlogits = _gradient_tile(x, is_target, used, shift, of_probability, of_target, of_all)
    begin, _, _ = _middle(out, width, PEEL)
    place = dlogits_ptr + begin[:, None] + columns[None, :]
    tl.store(place, dlogits.to(dlogits_ptr.dtype.element_ty), mask=in_column[:, None] & in_row)
    if PEEL:  # noqa: SIM102 - Triton decides this one when it compiles, the other as it runs
        if first_column == 0:
            ends, in_ends = _ends(head, length, width)
            in_ends = in_ends & in_column[:, None]
            x_ends = tl.load(logits_ptr + start[:, None] + ends, mask=in_ends & used[:, None], other=0.0).to(tl.float32)
            is_end = ends == wanted[:, None]
            dends = _gradient_tile(x_ends, is_end, used, shift, of_probability, of_target, of_all)
            tl.store(dlogits_ptr + out[:, None] + ends, dends.to(dlogits_ptr.dtype.element_ty), mask=in_ends)


fused_loss = define(
    "cross_entropy_forward(Tensor logits, Tensor target, int ignore_index, float label_smoothing, float z_loss, "
    "str reduction, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _launch_loss,
    _empty_loss,
    formula=_loss_formula,
)
fused_loss_gradients = define(
    "cross_entropy_backward(Tensor dloss, Tensor? count, Tensor logits, Tensor target, Tensor sums, int ignore_index, "
    "float label_smoothing, float z_loss) -> Tensor",
    _launch_gradients,
    _empty_gradients,
    formula=_gradients_formula,
)
