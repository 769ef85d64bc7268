"""chunks -- linear_cross_entropy for a chunk of rows at a time, with only their logits in memory.

For each chunk, with the losses and dlogits of cross_entropy:

    logits = x W^T + bias      dx = dlogits W      dW += dlogits^T x      dbias += dlogits summed over the rows

dW and dbias are accumulated in float32 at least. For 16-bit inputs that takes dW in float32, and on a CPU an eighth
more, since a chunk's product is computed for a slice of the classes at a time. A single chunk's product is dW itself.

All chunks have nearly the same number of rows, at most max(R * D / V, D, 512), or on a GPU as many as fit in 256 MiB of
logits (LOGITS_AT_ONCE), if that is more. The logits of a chunk then take as many bytes as the larger of x and weight,
which is little extra memory for an op that reads both, or 256 MiB. Each chunk but the first reads and writes all of dW,
8 V D bytes in float32, for 6 V D floating-point operations per row: with D rows per chunk, that is a few per cent of a
GPU's time at the widths of a large model; with fewer rows it is more.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch.dispatch import FakeTensor
from ..cross_entropy import fused_loss, fused_loss_gradients
from ..implementations import without_autocast
from ..linear import product, takes_onednn
from ..rows import cdiv

FEWEST_ROWS: Final = 512
LOGITS_AT_ONCE: Final = 1 << 28
"""Bytes of logits that a GPU may hold at once, even if neither x nor weight is that large."""
_SLICES: Final = 8
_FEWEST_CLASSES: Final = 4096  # of a slice, so that its matmul fills a GPU
Wanted = Sequence[bool]  # of x, weight and bias
Gradients = tuple[Tensor, Tensor, Tensor]  # empty if not wanted


def chunk_rows(num_rows: int, width: int, num_classes: int, *, at_once: int = 0) -> int:
    """Return the number of rows of a chunk; see the top of this file. `at_once` is a number of logits that fit.

    >>> chunk_rows(8192, 4096, 128256), chunk_rows(4097, 4096, 128256), chunk_rows(65536, 768, 50257)
    (4096, 2049, 993)
    >>> chunk_rows(65536, 768, 50257, at_once=1 << 27)
    2622
    """
    most = max(num_rows * width // num_classes, width, FEWEST_ROWS, at_once // num_classes)
    return max(cdiv(num_rows, max(cdiv(num_rows, most), 1)), 1)


def in_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    one_chunk: Callable[..., tuple[Tensor, Tensor | None]],
    *,
    skipped: int | None,
    scale: Tensor | None = None,
    wanted: Wanted = (False, False, False),
    numbers: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """Return the numbers of rows, [N, R] for N numbers per row, and the gradients of the sum of scale * results.

    Args:
        x, weight, bias, target: the inputs of the op.
        one_chunk: computes the numbers of a chunk, and its dlogits where there is a scale, from (x, weight, bias),
            target, scale and numbers of the chunk.
        skipped: rows with this target are not computed: their numbers and gradients are 0. None computes all.
        scale: [..., R], the gradients of the results; required for gradients.
        wanted: whether x, weight and bias need a gradient.
        numbers: the numbers that an earlier call returned, or None to compute them.
    """
    num_rows = target.numel()
    x_RD, target_R = x.reshape(num_rows, x.shape[-1]), target.reshape(-1)
    kept = None
    if skipped is not None and not (target.is_meta or isinstance(target, FakeTensor)):
        kept = (target_R != skipped).nonzero()[:, 0]
        kept = None if len(kept) == num_rows else kept
    count = num_rows if kept is None else len(kept)
    at_once = LOGITS_AT_ONCE // x.element_size() if x.is_cuda else 0
    size = chunk_rows(count, x_RD.shape[1], weight.shape[0], at_once=at_once)
    wide = torch.promote_types(x.dtype, torch.float32)
    dx_RD = x.new_zeros(x_RD.shape if wanted[0] else 0)
    dweight = dbias = None
    results = numbers
    with without_autocast(x):  # the inputs are cast already, and float32 products must stay float32
        for start in range(0, max(count, 1), size):
            rows = slice(start, start + size) if kept is None else kept[start : start + size]
            x_CD = x_RD[rows]
            numbers_NC, dlogits_CV = one_chunk(
                (x_CD, weight, bias),
                target_R[rows],
                None if scale is None else scale[..., rows],
                None if numbers is None else numbers[:, rows],
            )
            if numbers is None:
                if results is None:
                    results = numbers_NC.new_zeros(len(numbers_NC), num_rows)
                results[:, rows] = numbers_NC
            if dlogits_CV is None:
                continue
            if wanted[0]:
                if kept is None and not takes_onednn(dlogits_CV, weight):
                    torch.mm(dlogits_CV, weight, out=dx_RD[rows])
                else:
                    dx_RD[rows] = product(dlogits_CV, weight)
            if wanted[1]:
                dweight = _plus_product(dweight, dlogits_CV, x_CD, x.dtype if size >= count else wide)
            if wanted[2]:
                part = dlogits_CV.sum(0, dtype=wide)
                dbias = part if dbias is None else dbias + part
            del dlogits_CV  # else it would stay in memory until the next chunk's dlogits exist
    assert results is not None
    return results, (
        dx_RD.view(x.shape) if wanted[0] else dx_RD,
        x.new_empty(0) if dweight is None else cast(dweight, weight.dtype),
        x.new_empty(0) if dbias is None else cast(dbias, weight.dtype),
    )


def logits_of_chunk(x_CD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits of a chunk, [C, V]. Autograd does not record this."""
    if takes_onednn(x_CD, weight.t()):
        logits_CV = product(x_CD, weight.t())
        return logits_CV if bias is None else logits_CV.add_(bias)
    return F.linear(x_CD, weight, bias)


def loss_of_chunk(
    factors: tuple[Tensor, Tensor, Tensor | None],
    target_C: Tensor,
    scale_C: Tensor | None,
    numbers_3C: Tensor | None,
    *,
    options: Sequence[Any],
    by_kernel: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the losses with cross_entropy's m and l, and dlogits (None without a scale)."""
    # The matmul is here and not in the caller, whose frame would keep the logits alive until this call returns.
    logits_CV = logits_of_chunk(*factors)
    if by_kernel:
        if numbers_3C is None:
            losses_C, sums_2C, _ = fused_loss(logits_CV, target_C, *options, "none", torch.float32)
            numbers_3C = torch.cat((losses_C[None], sums_2C))
        if scale_C is None:
            return numbers_3C, None
        return numbers_3C, fused_loss_gradients(scale_C, None, logits_CV, target_C, numbers_3C[1:], *options)
    dtype = logits_CV.dtype
    # From here on there is one tensor of this size, modified in place.
    logits_CV = logits_CV.to(torch.promote_types(dtype, torch.float32))
    if numbers_3C is None:
        numbers_3C = _losses_in_place(logits_CV, target_C, *options)
    else:
        logits_CV.sub_(numbers_3C[1, :, None]).exp_()
    if scale_C is None:
        return numbers_3C, None
    return numbers_3C, cast(_gradients_in_place(scale_C, logits_CV, target_C, numbers_3C[1:], *options), dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # see dropout: [no cast that does nothing]


def _losses_in_place(
    logits_CV: Tensor, target_C: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    """Return the losses and m and l of each row, [3, C]; overwrites the logits with exp(logits - largest)."""
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    below_CV = logits_CV.sub_(largest_C1)
    losses_C = F.nll_loss(below_CV, target_C, ignore_index=ignore_index, reduction="none")
    if label_smoothing:
        losses_C = (1 - label_smoothing) * losses_C - label_smoothing * below_CV.mean(-1)
    log_total_C1 = below_CV.exp_().sum(-1, keepdim=True).log()
    losses_C = losses_C + log_total_C1[:, 0]
    if z_loss:
        losses_C = losses_C + z_loss * (largest_C1 + log_total_C1)[:, 0].square()
    losses_C = losses_C.masked_fill(target_C == ignore_index, 0.0)
    return torch.stack((losses_C, largest_C1[:, 0], log_total_C1[:, 0]))


def _gradients_in_place(
    scale_C: Tensor,
    exponentials_CV: Tensor,
    target_C: Tensor,
    sums_2C: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Return dlogits, written over the exponentials."""
    ignored_C = target_C == ignore_index
    scale_C1 = scale_C.to(sums_2C.dtype).masked_fill(ignored_C, 0.0)[:, None]
    target_C1 = target_C.masked_fill(ignored_C, 0)[:, None]
    largest_C1, log_total_C1 = sums_2C[0, :, None], sums_2C[1, :, None]
    of_probability_C1 = scale_C1 * (-log_total_C1).exp()
    if z_loss:
        of_probability_C1 = of_probability_C1 * (1 + 2 * z_loss * (largest_C1 + log_total_C1))
    dlogits_CV = exponentials_CV.mul_(of_probability_C1)
    if label_smoothing:
        dlogits_CV.sub_(scale_C1 * (label_smoothing / dlogits_CV.shape[1]))
    # Not scatter_add_, which is nondeterministic on a GPU; here each row has one target.
    at_target_C1 = dlogits_CV.gather(1, target_C1) - scale_C1 * (1 - label_smoothing)
    return dlogits_CV.scatter_(1, target_C1, at_target_C1)


def _plus_product(total_VD: Tensor | None, dlogits_CV: Tensor, x_CD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total + dlogits^T x, written over the total; the first total is of `dtype`."""
    # 126 ms against 10 ms in float32 for [4096, 256] x [256, 512] on one core of a CPU; bfloat16 takes 2 ms there.
    slow = x_CD.device.type == "cpu" and x_CD.dtype == torch.float16
    multiplied = torch.float32 if slow else x_CD.dtype
    if multiplied == x_CD.dtype == dtype:
        if total_VD is None or takes_onednn(dlogits_CV.mT, x_CD):
            product_VD = product(dlogits_CV.mT, x_CD)
            return product_VD if total_VD is None else total_VD.add_(product_VD)
        return total_VD.addmm_(dlogits_CV.mT, x_CD)
    first = total_VD is None
    if x_CD.is_cuda and dtype == torch.float32:  # its products take 16-bit factors and give float32
        if total_VD is None:
            return torch.mm(dlogits_CV.mT, x_CD, out_dtype=dtype)
        return torch.addmm(total_VD, dlogits_CV.mT, x_CD, out_dtype=dtype, out=total_VD)
    num_classes = dlogits_CV.shape[1]
    if total_VD is None:
        total_VD = x_CD.new_empty(num_classes, x_CD.shape[1], dtype=dtype)
    x_CD = cast(x_CD, multiplied)
    size = max(cdiv(num_classes, _SLICES), _FEWEST_CLASSES)
    for start in range(0, num_classes, size):
        total_SD = total_VD[start : start + size]
        product_SD = cast(dlogits_CV[:, start : start + size], multiplied).mT @ x_CD
        if first:
            total_SD.copy_(product_SD)
        else:
            total_SD.add_(product_SD)
    return total_VD
