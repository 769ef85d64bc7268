"""linear_cross_entropy -- cross_entropy(x W^T + bias, target), without ever holding the [R, V] logits of all rows.

    x        [..., D]   any float dtype; R rows of D
    weight   [V, D]     x's dtype; V classes
    bias     [V]        optional, x's dtype
    target   [...]      int64, in [0, V) or ignore_index

The rows are taken in chunks. For each one, with the losses and dlogits of cross_entropy:

    logits = x W^T + bias      dx = dlogits W      dW += dlogits^T x      dbias += dlogits summed over the rows

dW and dbias are added up in float32 at least.

A chunk has max(R * D / V, D, 512) rows. Its logits then take as many bytes as x or as the weight, whichever is more: an
op that reads both adds little to the memory it works in. Each chunk but the first reads and writes all of dW, 8 V D
bytes in float32, beside 6 V D floating-point operations per row: with D rows to a chunk a GPU spends a few per cent of
the time on it for the widths of a large model, and with fewer more.

Note: [ahead or again] For "mean" and "sum", forward makes the gradients along with the loss, and backward multiplies
them by the number that comes in: 3 matmuls of 2 R V D operations each, as many as the plain way has. Saved: dx and dW
(and dbias) in their inputs' dtypes, and neither x, nor the weight, nor logits. Where the loss is the last thing that
forward does, these bytes come no sooner than backward would need them. For "none" each row has an incoming number of
its own, and for float16 a gradient that a GradScaler has not scaled yet would vanish: backward makes the logits again,
with 4 matmuls in all. Saved: x, weight, bias and target, which are there already, and the kernels' logsumexp, 4 bytes
per row. Only the gradients that are asked for are made.

It is differentiated once: a backward under `create_graph` raises. Inside a transform of `torch.func`, and for tensor
subclasses, it is `cross_entropy(F.linear(x, weight, bias), target)` with all its logits. Under `torch.compile` and
`fuse` the chunks are traced, as many as there are.

Wijmans et al., "Cut your losses in large-vocabulary language models", 2024, and Liger-Kernel, Hsu et al., 2024, make
the loss in pieces too; gradients in forward are Liger's. torch.nn.functional.linear_cross_entropy of 2.13 does so with
`options`; it takes no label smoothing there, is not compiled, and its backward runs once.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..partition.torch_private import transforms_are_active
from .cross_entropy import (
    check_loss_options,
    check_target,
    count_for,
    cross_entropy,
    cross_entropy_reference,
    gradients_in_one_piece,
    loss_dtype,
    losses_by_formula,
    losses_in_one_piece,
    reduced,
)
from .forms import autocast_dtype, takes_kernels
from .shapes import check_floating, check_rows

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]

_FEWEST_ROWS: Final = 512


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    backend: str = "auto",
) -> Tensor:
    """Return cross_entropy(x W^T + bias, target), for the last layer of a language model.

    Under autocast the matmuls run in its dtype, and the loss is in float32 at least; else both are in x's dtype.

    Args:
        x: [..., D], any float dtype.
        weight: [V, D].
        target: [...], int64: classes in [0, V), or ignore_index.
        bias: [V], or None.
        ignore_index: rows with this target count for nothing.
        label_smoothing: between 0 and 1, the share of the target that is spread evenly over all classes.
        z_loss: times logsumexp(logits)^2 is added to a row's loss.
        reduction: "mean" over the rows that are not ignored (NaN if there are none), "sum", or "none" for [...].
        backend: "auto", "eager" for the formula, or "triton" for cross_entropy's kernels, inside a compiled function
            too; the matmuls are torch's in any case.

    Raises:
        ValueError: x, weight, bias and target do not fit each other, label_smoothing or z_loss is out of range, or the
            reduction or the backend is unknown.
        TypeError: a tensor is not floating, target is not int64, or an option is no number.
        IndexError: a target is out of range; the kernels give NaN instead.
        RuntimeError: "triton" was asked for and cannot take the call; or, in backward, a second derivative is wanted.

    >>> x, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [50.0, 0.0]])
    >>> linear_cross_entropy(x, weight, torch.tensor([0]))
    tensor(50.)
    """
    check_rows("x", x)
    _check_weight(x, weight, bias)
    check_target(target, "x", x)
    check_loss_options(ignore_index, label_smoothing, z_loss, reduction)
    lower = autocast_dtype(x.device)
    if lower is not None:
        # As autocast does, float64 is left alone.
        x, weight = (one if one.dtype == torch.float64 else one.to(lower) for one in (x, weight))
        bias = bias if bias is None or bias.dtype == torch.float64 else bias.to(lower)
    by_kernel = takes_kernels(backend, x, weight, bias)
    options = ignore_index, float(label_smoothing), float(z_loss)
    if not torch.compiler.is_compiling() and (
        transforms_are_active() or any(type(one) not in (Tensor, nn.Parameter, type(None)) for one in (x, weight, bias))
    ):
        logits = F.linear(x, weight, bias)
        return cross_entropy(
            logits,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            backend=backend,
        )
    dtype = loss_dtype(x.dtype, x.device)
    asked = torch.is_grad_enabled()
    wanted = tuple(asked and one is not None and one.requires_grad for one in (x, weight, bias))
    if any(wanted) and reduction != "none" and x.dtype != torch.float16:
        loss: Tensor = _Ahead.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, target, options, reduction, dtype, by_kernel, wanted
        )
        return loss
    if any(wanted):
        losses = _Again.apply(x, weight, bias, target, options, by_kernel, wanted)  # type: ignore[no-untyped-call]
    else:
        losses, _, _ = _in_chunks(x, weight, bias, target, options, by_kernel)
        assert losses is not None
    return reduced(losses.reshape(target.shape), count_for(reduction, target, ignore_index), reduction, dtype)


def _check_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_floating("weight", weight)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must be [V, {x.shape[-1]}] to fit x {list(x.shape)}, got {list(weight.shape)}")
    if not weight.shape[0]:
        raise ValueError(f"weight must have at least one class, got {list(weight.shape)}")
    if bias is not None:
        check_floating("bias", bias)
        if bias.shape != weight.shape[:1]:
            wanted = list(weight.shape[:1])
            raise ValueError(f"bias must be {wanted} to fit weight {list(weight.shape)}, got {list(bias.shape)}")
    for name, one in (("weight", weight), ("bias", bias)):
        if one is None:
            continue
        if one.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {one.device}; move it with .to(x.device)")
        if one.dtype != x.dtype and autocast_dtype(x.device) is None:
            advice = "convert one, or call it under torch.autocast"
            raise ValueError(f"{name} must have x's dtype {x.dtype}, got {one.dtype}; {advice}")


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """What the op means, with all logits, which are rounded to x's dtype as those of a chunk are."""
    return cross_entropy_reference(F.linear(x, weight, bias), target, **options)


_Options = tuple[int, float, float]
_Wanted = Sequence[bool]  # of x, weight and bias
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Ahead(torch.autograd.Function):
    """Makes the gradients in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: _Options,
        reduction: str,
        dtype: torch.dtype,
        by_kernel: bool,
        wanted: _Wanted,
    ) -> Tensor:
        count = count_for(reduction, target, options[0])
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = torch.ones((), dtype=wide, device=x.device) if count is None else count.to(wide).reciprocal()
        losses, _, gradients = _in_chunks(
            x, weight, bias, target, options, by_kernel, scale=scale.expand(target.shape), wanted=wanted
        )
        assert losses is not None
        ctx.save_for_backward(*gradients)
        return reduced(losses, count, reduction, dtype)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_create_graph()
        # Not in place: backward may be called again, with retain_graph=True.
        return *(None if one is None else one * dloss for one in ctx.saved_tensors), *(None,) * 6


class _Again(torch.autograd.Function):
    """Returns the losses of rows, and makes the logits a second time for the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: _Options,
        by_kernel: bool,
        wanted: _Wanted,
    ) -> Tensor:
        losses, lse, _ = _in_chunks(x, weight, bias, target, options, by_kernel)
        assert losses is not None
        ctx.save_for_backward(x, weight, bias, target, lse)
        ctx.rest = options, by_kernel, wanted
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_create_graph()
        x, weight, bias, target, lse = ctx.saved_tensors
        options, by_kernel, wanted = ctx.rest
        found = _gradients_again(dlosses, x, weight, bias, target, lse, *options, by_kernel, wanted)
        return *(one if want else None for one, want in zip(found, wanted, strict=True)), *(None,) * 4


# Note: [backward makes its own logits] torch's own partitioner merges equal calls: it would take forward's logits for
# backward's, and keep all of them. So backward is one op, which no compiler looks into, and which needs dlosses.
def _run_again(
    dlosses: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    by_kernel: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    options = ignore_index, label_smoothing, z_loss
    _, _, (dx, dweight, dbias) = _in_chunks(
        x, weight, bias, target, options, by_kernel, scale=dlosses, wanted=wanted, lse=lse
    )
    absent = x.new_empty(0)
    return (
        absent if dx is None else dx,
        absent.clone() if dweight is None else dweight,
        absent.clone() if dbias is None else dbias,
    )


def _like_gradients(
    dlosses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = x.shape, weight.shape, weight.shape[:1]
    dx, dweight, dbias = (x.new_empty(shape if want else (0,)) for shape, want in zip(shapes, rest[-1], strict=True))
    return dx, dweight, dbias


_library = torch.library.Library("fuselayers", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "linear_cross_entropy_again(Tensor dlosses, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? lse, "
    "int ignore_index, float label_smoothing, float z_loss, bool by_kernel, bool[] wanted) -> (Tensor, Tensor, Tensor)"
)
_library.impl("linear_cross_entropy_again", _run_again, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("fuselayers::linear_cross_entropy_again", _like_gradients, lib=_library)
_gradients_again = torch.ops.fuselayers.linear_cross_entropy_again.default


def _refuse_create_graph() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        advice = "take cross_entropy(F.linear(x, weight, bias), target)"
        raise RuntimeError(f"linear_cross_entropy is differentiated once; for a backward under create_graph {advice}")


def rows_of_a_chunk(num_rows: int, width: int, num_classes: int) -> int:
    """Return how many rows are worked on at a time; the module says why.

    >>> rows_of_a_chunk(8192, 4096, 128256), rows_of_a_chunk(65536, 768, 50257)
    (4096, 1001)
    """
    return max(num_rows * width // num_classes, width, _FEWEST_ROWS)


def _in_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: _Options,
    by_kernel: bool,
    *,
    scale: Tensor | None = None,
    wanted: _Wanted = (False, False, False),
    lse: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, _Gradients]:
    """Return the rows' losses [R], the kernels' logsumexp [R], and the gradients of the sum of scale * losses.

    There are no losses where logsumexp is known: an earlier call returned them.

    Args:
        x, weight, bias, target, options: as the op has them.
        by_kernel: whether a chunk's losses and dlogits are made by kernels.
        scale: [...] as target, where gradients are wanted.
        wanted: of x, weight and bias.
        lse: what an earlier call returned.
    """
    x_RD, target_R = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    size = rows_of_a_chunk(x_RD.shape[0], x_RD.shape[1], weight.shape[0])
    scales = None if scale is None else torch.split(scale.reshape(-1), size)
    known = None if lse is None else torch.split(lse, size)
    losses, sums, dx = [], [], []
    dweight = dbias = None
    # Under autocast x and weight have been cast; the products in float32 below are to stay in it.
    with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):  # meta has none
        pairs = zip(torch.split(x_RD, size), torch.split(target_R, size), strict=True)
        for place, (x_CD, target_C) in enumerate(pairs):
            losses_C, lse_C, dlogits_CV = _in_one_chunk(
                F.linear(x_CD, weight, bias),
                target_C,
                options,
                by_kernel,
                scale_C=None if scales is None else scales[place],
                lse_C=None if known is None else known[place],
            )
            if losses_C is not None:
                losses.append(losses_C)
            if lse_C is not None:
                sums.append(lse_C)
            if dlogits_CV is None:
                continue
            if wanted[0]:
                dx.append(dlogits_CV @ weight)
            if wanted[1]:
                dweight = _plus_product(dweight, dlogits_CV, x_CD)
            if wanted[2]:
                part = dlogits_CV.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
                dbias = part if dbias is None else dbias + part
            del dlogits_CV  # else it would live until the next chunk has made its own
    gradients = (
        torch.cat(dx).view(x.shape) if dx else None,
        None if dweight is None else _cast(dweight, weight.dtype),
        None if dbias is None else _cast(dbias, weight.dtype),
    )
    return torch.cat(losses) if losses else None, torch.cat(sums) if sums else None, gradients


def _in_one_chunk(
    logits_CV: Tensor,
    target_C: Tensor,
    options: _Options,
    by_kernel: bool,
    *,
    scale_C: Tensor | None,
    lse_C: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return losses (None where logsumexp was known), the kernels' logsumexp, and dlogits where a scale was given."""
    if by_kernel:
        losses_C = None
        if lse_C is None:
            losses_C, lse_C = losses_in_one_piece(logits_CV, target_C, *options, torch.float32)
        if scale_C is None:
            return losses_C, lse_C, None
        return losses_C, lse_C, gradients_in_one_piece(scale_C, None, logits_CV, target_C, lse_C, *options)
    losses_C, log_probabilities_CV = losses_by_formula(logits_CV, target_C, *options)
    if scale_C is None:
        return losses_C, None, None
    return losses_C, None, _gradients_by_formula(scale_C, logits_CV, log_probabilities_CV.exp_(), target_C, *options)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # see dropout: [no cast that does nothing]


def _gradients_by_formula(
    scale_C: Tensor,
    logits_CV: Tensor,
    probabilities_CV: Tensor,
    target_C: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Return dlogits, written over the probabilities."""
    ignored_C = target_C == ignore_index
    scale_C1 = scale_C.masked_fill(ignored_C, 0.0)[:, None]
    target_C1 = target_C.masked_fill(ignored_C, 0)[:, None]
    of_probability_C1 = scale_C1
    if z_loss:
        lse_C1 = logits_CV.to(probabilities_CV.dtype).logsumexp(-1, keepdim=True)
        of_probability_C1 = scale_C1 * (1 + 2 * z_loss * lse_C1)
    dlogits_CV = probabilities_CV.mul_(of_probability_C1)
    if label_smoothing:
        dlogits_CV.sub_(scale_C1 * (label_smoothing / logits_CV.shape[1]))
    # Not scatter_add_, whose order on a GPU is left to chance; here each row has one place.
    at_target_C1 = dlogits_CV.gather(1, target_C1) - scale_C1 * (1 - label_smoothing)
    return dlogits_CV.scatter_(1, target_C1, at_target_C1).to(logits_CV.dtype)


def _plus_product(total_VD: Tensor | None, dlogits_CV: Tensor, x_CD: Tensor) -> Tensor:
    """Return total + dlogits^T x in float32 at least."""
    wide = torch.promote_types(x_CD.dtype, torch.float32)
    if x_CD.device.type == "cpu":
        # Most CPUs have no matmul in 16 bits.
        dlogits_CV, x_CD = dlogits_CV.to(wide), x_CD.to(wide)
        return dlogits_CV.mT @ x_CD if total_VD is None else total_VD.addmm_(dlogits_CV.mT, x_CD)
    if total_VD is not None and x_CD.dtype == wide:
        return total_VD.addmm_(dlogits_CV.mT, x_CD)
    part_VD = (dlogits_CV.mT @ x_CD).to(wide)
    return part_VD if total_VD is None else total_VD.add_(part_VD)
