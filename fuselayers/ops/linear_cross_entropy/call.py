"""linear_cross_entropy -- cross_entropy(x W^T + bias, target), without ever holding the [R, V] logits of all rows.

    x        [..., D]   any float dtype; R rows of D
    weight   [V, D]     x's dtype; V classes
    bias     [V]        optional, x's dtype
    target   [...]      int64, in [0, V) or ignore_index

The rows are taken in chunks (see chunks).

Note: [ahead, between or again] For "mean" and "sum", forward makes the gradients along with the loss, and backward
multiplies them by the number that comes in: 3 matmuls of 2 R V D operations each, as many as the plain way has. Saved:
dx and dW (and dbias) in their inputs' dtypes, and no logits. Where the loss is the last thing that forward does, these
bytes come no sooner than backward would need them. While backward multiplies, there are two of dW. So with fewer than D
rows, whose dlogits are smaller than dW, forward makes dlogits, and backward the gradients, with 3 matmuls too. Saved:
x, weight and dlogits. For "none" each row has an incoming number of its own, and for float16 a gradient that a
GradScaler has not scaled yet would vanish: backward makes the logits again, with 4 matmuls in all. Saved: x, weight,
bias and target, which are there already, and two numbers per row. Only the gradients that are asked for are made.

It is differentiated once: a backward under `create_graph` raises. Inside a transform of `torch.func`, and for tensor
subclasses, it is `cross_entropy(F.linear(x, weight, bias), target)` with all its logits.

Note: [one piece for compilers] Under `torch.compile` and `fuse` each pass is one op, which no compiler looks into. The
chunks would make another graph for each number of them, a sum in place would be a copy of dW for each slice, and equal
logits in forward and backward are merged by torch's own partitioner: it would keep all of them.

Wijmans et al., "Cut your losses in large-vocabulary language models", 2024, and Liger-Kernel, Hsu et al., 2024, make
the loss in pieces too; gradients in forward are Liger's. torch.nn.functional.linear_cross_entropy of 2.13 does so with
`options`; it takes no label smoothing there, is not compiled, and its backward runs once.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._torch.dispatch import is_compiling, transforms_are_active
from ..cross_entropy import cross_entropy, cross_entropy_reference
from ..implementations import autocast_dtype, each_once, takes_kernels
from ..losses import check_loss_options, check_target, count_for, loss_dtype, reduced
from ..shapes import check_linear
from .chunks import Gradients, Wanted, cast, in_chunks, in_one_chunk, in_own_dtype

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]


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
        backend: "auto", "eager" for the formula, or "triton" for cross_entropy's kernels, which "auto" takes on a GPU;
            inside a compiled function too. The matmuls are torch's in any case.

    Raises:
        ValueError: x, weight, bias and target do not fit each other, label_smoothing or z_loss is out of range, or the
            reduction or the backend is unknown.
        TypeError: a tensor is not floating or, outside autocast, not of x's dtype; target is not int64; or an option is
            no number.
        IndexError: a target is out of range; the kernels give NaN instead.
        RuntimeError: "triton" was asked for and cannot take the call; or, in backward, a second derivative is wanted.

    >>> x, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [50.0, 0.0]])
    >>> linear_cross_entropy(x, weight, torch.tensor([0]))
    tensor(50.)
    """
    check_linear(x, weight, bias, letter="V")
    if not weight.shape[0]:
        raise ValueError(f"weight must have at least one class, got {list(weight.shape)}")
    check_target(target, "x", x)
    check_loss_options(ignore_index, label_smoothing, z_loss, reduction)
    given = x, weight, bias
    lower = autocast_dtype(x.device)
    if lower is not None:
        # As autocast does, float64 is left alone.
        x, weight = (one if one.dtype == torch.float64 else one.to(lower) for one in (x, weight))
        bias = bias if bias is None or bias.dtype == torch.float64 else bias.to(lower)
    takes_kernels(backend, x, weight, bias)  # which says so if it cannot; asked again when it runs
    compiling = is_compiling()
    if any(type(one) not in (Tensor, nn.Parameter, type(None)) for one in (x, weight, bias)) or (
        not compiling and transforms_are_active()
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
    asked = torch.is_grad_enabled()
    wanted = [asked and one is not None and one.requires_grad for one in (x, weight, bias)]
    options = ignore_index, float(label_smoothing), float(z_loss), backend
    dtype = loss_dtype(x.dtype, x.device)
    if not any(wanted):
        losses, _ = (_losses if compiling else _run_losses)(x, weight, bias, target, *options)
        return reduced(losses.reshape(target.shape), count_for(reduction, target, ignore_index), reduction, dtype)
    if compiling:
        x, weight, bias = each_once((x, weight, bias))
    loss: Tensor
    if reduction == "none" or x.dtype == torch.float16:
        losses = _LinearCrossEntropyAgain.apply(x, weight, bias, target, options, wanted)  # type: ignore[no-untyped-call]
        loss = reduced(losses.reshape(target.shape), count_for(reduction, target, ignore_index), reduction, dtype)
    elif wanted[1] and target.numel() < x.shape[-1]:
        loss = _LinearCrossEntropyBetween.apply(x, weight, bias, target, options, reduction, dtype)  # type: ignore[no-untyped-call]
    else:
        loss = _LinearCrossEntropyAhead.apply(x, weight, bias, target, options, reduction, dtype, wanted)  # type: ignore[no-untyped-call]
    if compiling:
        leads = [one for one, want in zip(given, wanted, strict=True) if want]
        loss = _LinearCrossEntropyOnce.apply(loss, *each_once(leads))  # type: ignore[no-untyped-call]
    return loss


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """What the op means, with all logits, which are rounded to x's dtype as those of a chunk are."""
    return cross_entropy_reference(F.linear(x, weight, bias), target, **options)


_Options = tuple[int, float, float, str]  # ignore_index, label_smoothing, z_loss, backend


class _LinearCrossEntropyAhead(torch.autograd.Function):
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
        wanted: Wanted,
    ) -> Tensor:
        run = _ahead if is_compiling() else _run_ahead
        loss, *gradients = run(x, weight, bias, target, *options, reduction, dtype, wanted)
        found = (one if want else None for one, want in zip(gradients, wanted, strict=True))
        ctx.save_for_backward(*found)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_create_graph()
        # Not in place: backward may be called again, with retain_graph=True.
        return *(None if one is None else one * dloss for one in ctx.saved_tensors), *(None,) * 5


class _LinearCrossEntropyBetween(torch.autograd.Function):
    """Makes dlogits in forward, and the gradients of them in backward."""

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
    ) -> Tensor:
        run = _between if is_compiling() else _run_between
        loss, dlogits_RV = run(x, weight, bias, target, *options, reduction, dtype)
        ctx.save_for_backward(x, weight, dlogits_RV)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_create_graph()
        x, weight, dlogits_RV = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        x_RD = x.reshape(dlogits_RV.shape[0], x.shape[-1])
        dx = dweight = dbias = None
        if wants_x:
            dx = (dlogits_RV @ weight * dloss).view(x.shape)
        if wants_weight:
            dweight = dlogits_RV.mT @ (x_RD * dloss)
        if wants_bias:
            wide = torch.promote_types(x.dtype, torch.float32)
            dbias = cast(dlogits_RV.sum(0, dtype=wide) * dloss, weight.dtype)
        return dx, dweight, dbias, *(None,) * 4


class _LinearCrossEntropyAgain(torch.autograd.Function):
    """Returns the losses of rows, and makes the logits a second time for the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: _Options,
        wanted: Wanted,
    ) -> Tensor:
        losses, sums = (_losses if is_compiling() else _run_losses)(x, weight, bias, target, *options)
        ctx.save_for_backward(x, weight, bias, target, sums)
        ctx.rest = options, wanted
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_create_graph()
        options, wanted = ctx.rest
        found = (_again if is_compiling() else _run_again)(dlosses, *ctx.saved_tensors, *options, wanted)
        return *(one if want else None for one, want in zip(found, wanted, strict=True)), *(None,) * 3


class _LinearCrossEntropyOnce(torch.autograd.Function):
    """The loss. Its backward, where a compiler made it, cannot be differentiated in silence.

    A compiled backward raises when it is differentiated, if autograd finds its way through it to what is asked for.
    That way is made of what is saved. Gradients that were made in forward need none themselves: theirs would be taken
    for a constant, and the loss's share in a second derivative be left out. So what leads to the loss is saved, as it
    was given: after a cast, as under autocast, it would be no way, and kept for nothing.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *leads: Tensor) -> Tensor:
        ctx.save_for_backward(*leads)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        leads = ctx.saved_tensors
        return _only_once(dloss, list(leads)), *(None for _ in leads)


def _run_losses(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The rows' losses [R], and cross_entropy's two numbers of each, [2, R]."""
    losses, sums, _ = in_chunks(x, weight, bias, target, options)
    assert losses is not None
    assert sums is not None
    return losses, sums


def _run_ahead(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options, reduction, dtype, wanted = rest
    count, scale = _scale_for(x, target, options[0], reduction)
    losses, _, gradients = in_chunks(x, weight, bias, target, options, scale=scale, wanted=wanted)
    assert losses is not None
    return reduced(losses, count, reduction, dtype), *gradients


def _scale_for(x: Tensor, target: Tensor, ignore_index: int, reduction: str) -> tuple[Tensor | None, Tensor]:
    """The number of rows that count, for a mean, and what comes in for each row from a loss whose gradient is 1."""
    count = count_for(reduction, target, ignore_index)
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = torch.ones((), dtype=wide, device=x.device) if count is None else count.to(wide).reciprocal()
    return count, scale.expand(target.shape)


def _run_between(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *options, backend, reduction, dtype = rest
    count, scale = _scale_for(x, target, options[0], reduction)
    with in_own_dtype(x):
        losses, _, dlogits_RV = in_one_chunk(
            (x.reshape(target.numel(), x.shape[-1]), weight, bias),
            target.reshape(-1),
            options,
            takes_kernels(backend, x, weight, bias),
            scale_C=scale.reshape(-1),
            sums_2C=None,
        )
    assert losses is not None
    assert dlogits_RV is not None
    return reduced(losses, count, reduction, dtype), dlogits_RV


def _run_again(
    dlosses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, sums: Tensor, *rest: Any
) -> Gradients:
    *options, wanted = rest
    return in_chunks(x, weight, bias, target, options, scale=dlosses, wanted=wanted, sums=sums)[2]


def _like_losses(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(target.numel(), dtype=wide), x.new_empty(2, target.numel(), dtype=wide)


def _like_loss_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, dtype, wanted = rest
    return x.new_empty((), dtype=dtype), *_like_gradients(x, x, weight, bias, target, x, wanted)


def _like_loss_and_dlogits(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty((), dtype=rest[-1]), x.new_empty(target.numel(), weight.shape[0])


def _like_gradients(
    dlosses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, sums: Tensor, *rest: Any
) -> Gradients:
    shapes = x.shape, weight.shape, weight.shape[:1]
    dx, dweight, dbias = (x.new_empty(shape if want else (0,)) for shape, want in zip(shapes, rest[-1], strict=True))
    return dx, dweight, dbias


def _refuse_create_graph() -> None:
    if torch.is_grad_enabled() and not is_compiling():
        advice = "take cross_entropy(F.linear(x, weight, bias), target)"
        raise RuntimeError(f"linear_cross_entropy is differentiated once; for a backward under create_graph {advice}")


_library = torch.library.Library("fuselayers", "FRAGMENT")  # type: ignore[no-untyped-call]


# See [one piece for compilers]. They are torch's matmuls, and on a GPU our kernels, on any device.
def _define(schema: str, run: Any, fake: Any) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fuselayers::{name}", fake, lib=_library)
    return getattr(torch.ops.fuselayers, name).default


_OPTIONS: Final = "int ignore_index, float label_smoothing, float z_loss, str backend"
_losses = _define(
    f"linear_cross_entropy_rows(Tensor x, Tensor weight, Tensor? bias, Tensor target, {_OPTIONS}) -> (Tensor, Tensor)",
    _run_losses,
    _like_losses,
)
_ahead = _define(
    f"linear_cross_entropy_ahead(Tensor x, Tensor weight, Tensor? bias, Tensor target, {_OPTIONS}, str reduction, "
    "ScalarType dtype, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_ahead,
    _like_loss_and_gradients,
)
_between = _define(
    f"linear_cross_entropy_between(Tensor x, Tensor weight, Tensor? bias, Tensor target, {_OPTIONS}, str reduction, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    _run_between,
    _like_loss_and_dlogits,
)
_again = _define(
    "linear_cross_entropy_backward(Tensor dlosses, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor sums, "
    f"{_OPTIONS}, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _run_again,
    _like_gradients,
)
_only_once = _define(
    "linear_cross_entropy_once(Tensor dloss, Tensor[] leads) -> Tensor",
    lambda dloss, leads: dloss.clone(),
    lambda dloss, leads: torch.empty_like(dloss),
)
