"""linear_cross_entropy -- cross_entropy(x W^T + bias, target), without all [R, V] logits in memory.

    x        [..., D]   any float dtype; R rows of D
    weight   [V, D]     x's dtype; V classes
    bias     [V]        optional, x's dtype
    target   [...]      int64, in [0, V) or ignore_index

The rows are processed in chunks (see chunks). On a CPU rows with ignore_index are not computed, except in 2. below.

Note: [all logits fit] If all logits take at most 256 MiB on a GPU, it is cross_entropy(F.linear(x, weight, bias),
target). Forward computes no gradient, which a call without a backward would not need, nothing is computed twice, and
no sum over chunks moves dW. Saved: the logits, as in plain torch, and no softmax.

Note: [three ways] Else there are three ways to compute the gradients. Only gradients that are required are computed.

1. "mean" and "sum": forward computes the gradients with the loss, and backward multiplies them by the incoming
   gradient. 3 matmuls of 2 R V D operations each, as many as without chunks. Saved: dx and dW (and dbias) in their
   inputs' dtypes, no logits. If the loss is the end of forward, peak memory does not grow. Backward holds dW twice.
2. With fewer than D rows dlogits are smaller than dW: forward computes dlogits, and backward the gradients, with 3
   matmuls too. Saved: x, weight and dlogits. The way of 1. takes 1.46 s instead of 1.26 s, and 764 MB instead of 663,
   against 659 MB of plain torch (256 rows, D 768, V 50257, float32, one core of an AMD EPYC).
3. "none" and float16: backward recomputes the logits, with 4 matmuls in all. "none" has an incoming gradient per row.
   In float16 a gradient would underflow before a GradScaler scales it. Saved: x, weight, bias and target, which exist
   already, and three numbers per row.

It is differentiable once: a backward under `create_graph` raises. Inside a transform of `torch.func`, and for tensor
subclasses, it is `cross_entropy(F.linear(x, weight, bias), target)` with all logits.

Note: [opaque to compilers] Under `torch.compile` and `fuse` each pass is one registered op. A compiler that traced the
chunks would make a graph for each number of chunks, copy dW for each slice of an in-place sum, and merge equal logits
of forward and backward, which would save all of them. So this op is not an `Op`, whose formula compilers trace. On a
GPU it takes cross_entropy's kernels in every compiled graph.

Wijmans et al., "Cut your losses in large-vocabulary language models", 2024, and Liger-Kernel, Hsu et al., 2024, compute
the loss in chunks too; gradients in forward are Liger's idea. torch.nn.functional.linear_cross_entropy of torch 2.13
does so with `options`, without label smoothing, without compilation, and with a single backward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch.dispatch import PLAIN_OR_FAKE_TENSORS, is_compiling, transforms_are_active
from ..cross_entropy import cross_entropy, cross_entropy_reference, fused_cross_entropy
from ..implementations import autocast_dtype, define, in_cpp, uses_kernels, without_autocast, without_repeats
from ..linear import product
from ..losses import check_loss_options, check_target, loss_dtype, reduce_losses, row_count
from ..shapes import check_linear
from . import chunks
from .chunks import Gradients, Wanted, cast, in_chunks, loss_of_chunk


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
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return cross_entropy(x W^T + bias, target), for the last layer of a language model.

    Under autocast the matmuls run in its dtype, and the loss is in float32 at least; else both are in x's dtype.

    Args:
        x: [..., D], any float dtype.
        weight: [V, D].
        target: [...], int64: classes in [0, V), or ignore_index.
        bias: [V], or None.
        ignore_index: rows with this target are ignored.
        label_smoothing: between 0 and 1, the share of the target spread evenly over all classes.
        z_loss: the factor of logsumexp(logits)^2, which is added to a row's loss.
        reduction: "mean" over the rows that are not ignored (NaN if there are none), "sum", or "none" for [...].
        backend: "auto", "eager" for the formula, or "cpp" or "triton" for cross_entropy's kernels. "auto" takes the
            Triton kernels on a GPU, inside a compiled function too, and the formula on a CPU. The matmuls are always
            torch's.
        dtype: the dtype of the loss, for example float32 for a bfloat16 model; None for the dtype above.

    Raises:
        ValueError: x, weight, bias and target do not fit each other, label_smoothing or z_loss is out of range, or the
            reduction or the backend is unknown.
        TypeError: a tensor is not dense and floating or, outside autocast, not of x's dtype; target is not int64; or an
            option is not a number.
        IndexError: a target is out of range; Triton's kernels give NaN instead.
        RuntimeError: the backend cannot take the call; or backward runs under `create_graph` or a transform.

    >>> x, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [50.0, 0.0]])
    >>> linear_cross_entropy(x, weight, torch.tensor([0]))
    tensor(50.)
    """
    check_linear(x, weight, bias)
    check_target(target, "x", x)
    check_loss_options(ignore_index, label_smoothing, z_loss, reduction)
    inputs = x, weight, bias
    x, weight, bias = under_autocast(x, weight, bias)
    by_kernel = uses_kernels(backend, x, weight, bias)  # raises early if the backend cannot take the call
    compiling = is_compiling()
    # Inside a compiler `uses_kernels` is False for "auto", but the kernels take the call there too.
    by_kernel = by_kernel or (compiling and backend == "auto" and x.is_cuda and x.dtype != torch.float64)
    dtype = loss_dtype(x.dtype, x.device) if dtype is None else dtype
    if needs_all_logits(x, weight, bias):
        logits = F.linear(x, weight, bias)
        return cross_entropy(
            logits.to(torch.promote_types(logits.dtype, dtype)),
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            backend=backend,
        ).to(dtype)
    if by_kernel and not in_cpp(x) and target.numel() * weight.shape[0] * x.element_size() <= chunks.LOGITS_AT_ONCE:
        fitting: Tensor = fused_cross_entropy(
            F.linear(x, weight, bias), target, ignore_index, float(label_smoothing), float(z_loss), reduction, dtype
        )
        return fitting
    records = torch.is_grad_enabled()
    wanted = [records and tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)]
    options = ignore_index, float(label_smoothing), float(z_loss), backend
    if not any(wanted):
        losses = _losses(x, weight, bias, target, *options)[0]
        return reduce_losses(losses.reshape(target.shape), row_count(reduction, target, ignore_index), reduction, dtype)
    if compiling:
        x, weight, bias = without_repeats((x, weight, bias))
    loss: Tensor
    if reduction == "none" or x.dtype == torch.float16:
        (losses,) = Recomputed.apply(_losses, _backward, _ONLY_ONCE, 1, x, weight, bias, target, options, wanted)  # type: ignore[no-untyped-call]
        loss = reduce_losses(losses.reshape(target.shape), row_count(reduction, target, ignore_index), reduction, dtype)
    elif wanted[1] and target.numel() < x.shape[-1]:
        loss = _WithDlogits.apply(x, weight, bias, target, options, reduction, dtype)  # type: ignore[no-untyped-call]
    else:
        loss = _WithGradients.apply(x, weight, bias, target, options, reduction, dtype, wanted)  # type: ignore[no-untyped-call]
    if compiling:
        leaves = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]
        loss = _NoSecondDerivative.apply(loss, *without_repeats(leaves))  # type: ignore[no-untyped-call]
    return loss


def under_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the inputs in autocast's dtype, which leaves float64 unchanged. Used here and by linear_log_prob."""
    lower = autocast_dtype(x.device)
    if lower is None:
        return x, weight, bias
    x, weight = (tensor if tensor.dtype == torch.float64 else tensor.to(lower) for tensor in (x, weight))
    return x, weight, bias if bias is None or bias.dtype == torch.float64 else bias.to(lower)


def needs_all_logits(*tensors: Tensor | None) -> bool:
    """Return whether a transform or a tensor subclass needs the formula. Used here and by linear_log_prob."""
    plain = all(tensor is None or type(tensor) in PLAIN_OR_FAKE_TENSORS for tensor in tensors)
    return not plain or (not is_compiling() and transforms_are_active())


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """The definition of the op, with all logits, rounded to x's dtype as those of a chunk."""
    return cross_entropy_reference(F.linear(x, weight, bias), target, **options)


_Options = tuple[int, float, float, str]  # ignore_index, label_smoothing, z_loss, backend
_ONLY_ONCE: Final = (
    "linear_cross_entropy can be differentiated only once; for a backward under create_graph or in a transform "
    "use cross_entropy(F.linear(x, weight, bias), target)"
)


class _WithGradients(torch.autograd.Function):
    """Computes the gradients in forward."""

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
        loss: Tensor
        loss, *gradients = _with_gradients(x, weight, bias, target, *options, reduction, dtype, wanted)
        kept = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
        ctx.save_for_backward(*kept)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_create_graph()
        # Not in place: backward may be called again, with retain_graph=True.
        return *(None if gradient is None else gradient * dloss for gradient in ctx.saved_tensors), *(None,) * 5


class _WithDlogits(torch.autograd.Function):
    """Computes dlogits in forward, and the gradients from them in backward."""

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
        loss: Tensor
        loss, dlogits_RV = _with_dlogits(x, weight, bias, target, *options, reduction, dtype)
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
            dx = (product(dlogits_RV, weight) * dloss).view(x.shape)
        if wants_weight:
            dweight = product(dlogits_RV.mT, x_RD * dloss)
        if wants_bias:
            wide = torch.promote_types(x.dtype, torch.float32)
            dbias = cast(dlogits_RV.sum(0, dtype=wide) * dloss, weight.dtype)
        return dx, dweight, dbias, *(None,) * 4


class Recomputed(torch.autograd.Function):
    """Returns the first numbers of rows, and recomputes the logits in backward. Used here and by linear_log_prob.

    `numbers_of` and `gradients_of` are the op's forward and backward, `error` the text for a second derivative.
    """

    @staticmethod
    def forward(
        ctx: Any,
        numbers_of: Callable[..., Tensor],
        gradients_of: Callable[..., Gradients],
        error: str,
        num_results: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: Sequence[Any],
        wanted: Wanted,
    ) -> tuple[Tensor, ...]:
        numbers = numbers_of(x, weight, bias, target, *options)
        ctx.save_for_backward(x, weight, bias, target, numbers)
        ctx.rest = gradients_of, error, options, wanted
        return tuple(number.clone() for number in numbers[:num_results])  # a saved tensor must not be an output

    @staticmethod
    def backward(ctx: Any, *dnumbers: Tensor) -> tuple[Tensor | None, ...]:
        gradients_of, error, options, wanted = ctx.rest
        _refuse_create_graph(error)
        gradients = gradients_of(torch.stack(dnumbers), *ctx.saved_tensors, *options, wanted)
        kept = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
        return *(None,) * 4, *kept, *(None,) * 3


class _NoSecondDerivative(torch.autograd.Function):
    """Returns the loss, and makes a second derivative of a compiled function raise instead of being wrong.

    A compiled backward raises when it is differentiated, but only if its saved tensors depend on the wanted input.
    Gradients computed in forward are saved as constants, so a second derivative would silently omit the loss. So this
    function saves the inputs as the caller passed them: for autograd, a copy by autocast would not depend on them.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*leaves)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        leaves = ctx.saved_tensors
        return _no_second_derivative(dloss, list(leaves)), *(None for _ in leaves)


def _run_losses(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any) -> Tensor:
    """Return the losses of rows, and cross_entropy's m and l: [3, R]."""
    return _in_chunks(x, weight, bias, target, options)[0]


def _in_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: Sequence[Any], **rest: Any
) -> tuple[Tensor, Gradients]:
    *loss_options, backend = options
    by_kernel = uses_kernels(backend, x, weight, bias)
    one_chunk = partial(loss_of_chunk, options=loss_options, by_kernel=by_kernel)
    # On a GPU the host would wait for the number of skipped rows.
    skipped = None if x.is_cuda else loss_options[0]
    return in_chunks(x, weight, bias, target, one_chunk, skipped=skipped, **rest)


def _run_with_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options, reduction, dtype, wanted = rest
    count, scale = _scale_for(x, target, options[0], reduction)
    numbers, gradients = _in_chunks(x, weight, bias, target, options, scale=scale.reshape(-1), wanted=wanted)
    return reduce_losses(numbers[0], count, reduction, dtype), *gradients


def _scale_for(x: Tensor, target: Tensor, ignore_index: int, reduction: str) -> tuple[Tensor | None, Tensor]:
    """Return the divisor of a mean (else None), and each row's share in the loss."""
    count = row_count(reduction, target, ignore_index)
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = torch.ones((), dtype=wide, device=x.device) if count is None else count.to(wide).reciprocal()
    return count, scale.expand(target.shape)


def _run_with_dlogits(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    *options, backend, reduction, dtype = rest
    count, scale = _scale_for(x, target, options[0], reduction)
    with without_autocast(x):
        numbers, dlogits_RV = loss_of_chunk(
            (x.reshape(target.numel(), x.shape[-1]), weight, bias),
            target.reshape(-1),
            scale.reshape(-1),
            None,
            options=options,
            by_kernel=uses_kernels(backend, x, weight, bias),
        )
    assert dlogits_RV is not None
    return reduce_losses(numbers[0], count, reduction, dtype), dlogits_RV


def _run_backward(
    dnumbers: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, numbers: Tensor, *rest: Any
) -> Gradients:
    *options, wanted = rest
    return _in_chunks(x, weight, bias, target, options, scale=dnumbers[0], wanted=wanted, numbers=numbers)[1]


def _empty_losses(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(3, target.numel(), dtype=torch.promote_types(x.dtype, torch.float32))


def _empty_loss_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, dtype, wanted = rest
    return x.new_empty((), dtype=dtype), *empty_gradients(x, x, weight, bias, target, x, wanted)


def _empty_loss_and_dlogits(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty((), dtype=rest[-1]), x.new_empty(target.numel(), weight.shape[0])


def empty_gradients(
    dnumbers: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, numbers: Tensor, *rest: Any
) -> Gradients:
    shapes = x.shape, weight.shape, weight.shape[:1]
    dx, dweight, dbias = (x.new_empty(shape if want else (0,)) for shape, want in zip(shapes, rest[-1], strict=True))
    return dx, dweight, dbias


def _refuse_create_graph(error: str = _ONLY_ONCE) -> None:
    if not is_compiling() and (torch.is_grad_enabled() or transforms_are_active()):
        raise RuntimeError(error)


def define_opaque(schema: str, run: Any, fake: Any) -> Any:
    """Return `run`, which is one registered op while a compiler traces: see [opaque to compilers]."""
    op = define(schema, run, fake, keys=["CompositeExplicitAutograd"])

    def call(*arguments: Any) -> Any:
        return (op if is_compiling() else run)(*arguments)

    return call


_OPTIONS: Final = "int ignore_index, float label_smoothing, float z_loss, str backend"
_losses = define_opaque(
    f"linear_cross_entropy_losses(Tensor x, Tensor weight, Tensor? bias, Tensor target, {_OPTIONS}) -> Tensor",
    _run_losses,
    _empty_losses,
)
_with_gradients = define_opaque(
    f"linear_cross_entropy_with_gradients(Tensor x, Tensor weight, Tensor? bias, Tensor target, "
    f"{_OPTIONS}, str reduction, ScalarType dtype, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_with_gradients,
    _empty_loss_and_gradients,
)
_with_dlogits = define_opaque(
    f"linear_cross_entropy_with_dlogits(Tensor x, Tensor weight, Tensor? bias, Tensor target, "
    f"{_OPTIONS}, str reduction, ScalarType dtype) -> (Tensor, Tensor)",
    _run_with_dlogits,
    _empty_loss_and_dlogits,
)
_backward = define_opaque(
    "linear_cross_entropy_backward(Tensor dnumbers, Tensor x, Tensor weight, Tensor? bias, Tensor target, "
    f"Tensor numbers, {_OPTIONS}, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    empty_gradients,
)
_no_second_derivative = define_opaque(
    "linear_cross_entropy_no_second_derivative(Tensor dloss, Tensor[] leaves) -> Tensor",
    lambda dloss, leaves: dloss.clone(),
    lambda dloss, leaves: torch.empty_like(dloss),
)
