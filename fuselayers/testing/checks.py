"""The contract of a fused function, one check per clause.

Each check takes an op, its reference in plain torch, the op's tensors, and options for both. It raises AssertionError
if the op breaks the clause. It raises NotApplicable, which pytest and unittest treat as a skip, if the clause does not
apply. An op that draws random numbers needs its seed as an option.
"""

import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from .._torch.dispatch import deterministic_algorithms
from ..errors import in_one_line
from ..partition import BackendUnavailableError, fuse
from .comparison import (
    Op,
    Overwritten,
    as_tuple,
    assert_as_good_as,
    cast,
    compare,
    forward,
    incoming_for,
    results,
    untouched,
)

# Second derivatives and batched calls round in other places than the reference. Their checks test correctness only.
_LOOSE: Final = 8.0


class NotApplicable(unittest.SkipTest):
    """The check does not apply; the text says why."""


def check_single_gradients(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """Gradients are right if only one input needs a gradient, for each input."""
    for index, value in enumerate(inputs):
        if value.is_floating_point():
            assert_as_good_as(op, reference, inputs, wanted=[index], **options)


def check_mixed_dtypes(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """Op, reference and traced op return the same dtypes and values if one input has another dtype.

    The other dtype is float32, or bfloat16 where the inputs are float32.
    """
    own = _floating_dtype(inputs)
    other = torch.bfloat16 if own == torch.float32 else torch.float32
    fused = fuse(op, backend="eager", fallback=(), fullgraph=True)
    for most, odd_dtype in ((other, own), (own, other)):
        for index, odd in enumerate(inputs):
            if odd.is_floating_point():
                mixed = cast(inputs, most)
                mixed[index] = odd.to(odd_dtype)
                assert_as_good_as(op, reference, mixed, **options)
                assert_as_good_as(fused, reference, mixed, **options)


def check_autocast(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """Autocast changes nothing, or the same as in the reference: dtype and precision of ops with a matmul."""

    def under_autocast(fn: Op) -> Op:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16):
                return fn(*args, **kwargs)

        return call

    try:
        assert_as_good_as(under_autocast(op), reference, inputs, **options)
    except Overwritten:
        raise
    except AssertionError:
        assert_as_good_as(under_autocast(op), under_autocast(reference), inputs, **options)


def check_poisoned(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """The op reads no uninitialised memory."""
    with poisoned_memory():
        assert_as_good_as(op, reference, inputs, **options)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make `torch.empty` and similar functions return NaN, or the largest integer.

    >>> with poisoned_memory():
    ...     torch.empty(2)
    tensor([nan, nan])
    """
    with deterministic_algorithms(warn_only=True, fill_memory=True):
        yield


def check_not_finite(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """NaN and infinities in the first floating input reach the same results and gradients as in the reference.

    The reference in float64 counts too: on a CPU torch's vectorised gelu of inf is NaN, its scalar one inf.
    """
    _floating_dtype(inputs)
    for value in (torch.nan, torch.inf, -torch.inf):
        spoilt = [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]
        next(tensor for tensor in spoilt if tensor.is_floating_point()).view(-1)[:1] = value
        plain = results(reference, spoilt, **options)
        exact = results(reference, cast(spoilt, torch.float64), **options)
        for name, got in results(op, spoilt, **options).items():
            # Whether a gradient is NaN or infinite depends on how it is computed.
            kinds = (torch.isfinite,) if name.startswith("d") else (torch.isnan, torch.isposinf, torch.isneginf)
            for kind in kinds:
                differs = (kind(got) != kind(plain[name])) & (kind(got) != kind(exact[name]))
                index = differs.nonzero()[:1].flatten().tolist()
                message = f"{name} for {value} in the first input, at {index}: {kind.__name__} differs"
                assert not differs.any(), message


def check_double_backward(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> str | None:
    """A second derivative is right or raises; it is never a wrong number. Return the error, if it raises."""

    def second(fn: Op, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        def gradients(*leaves: Tensor, **options: Any) -> tuple[Tensor, ...]:
            outputs = as_tuple(fn(*leaves, **options))
            loss = torch.stack([out.square().sum() for out in outputs]).sum()
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            return torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True, materialize_grads=True)

        leaves, firsts = forward(gradients, inputs, **options)
        pairs = zip(firsts, incoming_for(firsts), strict=True)
        reached = [(gradient, incoming) for gradient, incoming in pairs if gradient.requires_grad]
        # Not `torch.autograd.grad`: it skips the nodes that raise for a missing second derivative.
        torch.autograd.backward([gradient for gradient, _ in reached], [incoming for _, incoming in reached])
        zeros = {index: torch.zeros_like(leaf) for index, leaf in leaves.items()}
        seconds = {index: zeros[index] if leaf.grad is None else leaf.grad for index, leaf in leaves.items()}
        # All are named as gradients, since they are sums of many values.
        first = {f"d{index}": value.detach() for index, value in zip(leaves, firsts, strict=True)}
        return first | {f"dd{index}": value for index, value in seconds.items()}

    exact, plain = second(reference, cast(inputs, torch.float64)), second(reference, inputs)
    try:
        got = second(op, inputs)
    except Overwritten:
        raise
    except Exception as error:
        return f"raises {in_one_line(error)}"
    compare(got, plain, exact, inputs, slack=_LOOSE)
    return None


def check_transforms(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> str | None:
    """`torch.vmap` and `torch.func.vjp` give the reference's numbers, or raise. Return the error, if they raise."""

    def mapped(*batches: Tensor) -> Any:
        return torch.vmap(lambda *args: op(*args, **options))(*batches)

    def row_by_row(*batches: Tensor) -> Any:
        rows = [as_tuple(reference(*args, **options)) for args in zip(*batches, strict=True)]
        return tuple(torch.stack(outputs) for outputs in zip(*rows, strict=True))

    def by_func(fn: Op, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        call = partial(fn, **options)
        with untouched({f"input {index}": value for index, value in enumerate(inputs)}, by="the call"):
            outputs, pull = torch.func.vjp(lambda *args: as_tuple(call(*args)), *inputs)[:2]
            gradients = pull(tuple(incoming_for(outputs)))
        named = {f"y{index}": out for index, out in enumerate(outputs)}
        return named | {f"d{index}": gradient for index, gradient in enumerate(gradients)}

    if not all(value.is_floating_point() for value in inputs):
        raise NotApplicable("has inputs that are not floating")
    # The same values in another order, since the function may be defined only for these values.
    stacked = [torch.stack([value, value.flip(tuple(range(value.dim()))), value.roll(1)]) for value in inputs]
    doubles = cast(inputs, torch.float64)
    exact = results(row_by_row, cast(stacked, torch.float64)), by_func(reference, doubles)
    plain = results(row_by_row, stacked), by_func(reference, inputs)
    runs = ("torch.vmap", partial(results, mapped, stacked)), ("torch.func.vjp", partial(by_func, op, inputs))
    said = []
    for index, (name, run) in enumerate(runs):
        try:
            got = run()
        except Overwritten:
            raise
        except Exception as error:
            said.append(f"{name} raises {in_one_line(error)}")
        else:
            compare(got, plain[index], exact[index], inputs, where=f"{name}: ", slack=_LOOSE)
    return "; ".join(said) or None


def check_fused(op: Op, reference: Op, inputs: Sequence[Tensor], *, backend: str, **options: Any) -> None:
    """Fused in one graph, the op gives the reference's numbers, and the same mask for the same seed.

    Dynamo traces it, as for `torch.compile` with `fullgraph=True`. The backend "eager" compiles nothing.
    """
    try:
        fused = fuse(op, backend=backend, fallback=(), fullgraph=True)
    except BackendUnavailableError as error:
        raise NotApplicable(str(error)) from error
    assert_as_good_as(fused, reference, inputs, **options)
    assert fused.served_by == (backend,), f"wanted backend {backend}, got {fused.served_by}"


def check_dynamic(
    op: Op,
    reference: Op,
    inputs: Sequence[Tensor] | Callable[[tuple[int, int]], Sequence[Tensor]],
    **options: Any,
) -> None:
    """With dynamic sizes, the op is not compiled again for new sizes.

    The first two calls may compile: Dynamo compiles separately for a size of one, and dropout's mask for widths that
    are multiples of its eight lanes.

    Args:
        inputs: tensors, which are enlarged by repeating and shuffling their values; or a function that returns the
            inputs for a shape [rows, columns].
    """
    if callable(inputs):
        families = [inputs(shape) for shape in ((3, 21), (2, 16), (7, 129), (5, 40))]
    else:
        families = [_enlarged(inputs, factor) for factor in (1, 2, 3, 5)]
    try:
        for family in families:
            results(reference, family, **options)
    except Exception as error:
        raise NotApplicable(f"the reference takes no other sizes: raises {in_one_line(error)}") from error
    fused = fuse(lambda *args: op(*args, **options), backend="eager", fallback=(), fullgraph=True, dynamic=True)

    def call(*args: Any, **_: Any) -> Any:
        return fused(*args)

    for family in families[:2]:
        assert_as_good_as(call, reference, family, **options)
    with torch.compiler.set_stance("fail_on_recompile"):
        for family in families[2:]:
            assert_as_good_as(call, reference, family, **options)


def _enlarged(inputs: Sequence[Tensor], factor: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(factor)
    enlarged = []
    for value in inputs:
        tiled = value.repeat([factor if size > 1 else 1 for size in value.shape])
        if value.is_floating_point() and factor > 1:
            order = torch.randperm(tiled.numel(), generator=generator).to(value.device)
            tiled = tiled.view(-1)[order].view(tiled.shape)
        enlarged.append(tiled)
    return enlarged


def _floating_dtype(inputs: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of the first floating input."""
    for value in inputs:
        if value.is_floating_point():
            return value.dtype
    raise NotApplicable("has no floating input")
