"""comparison -- values and gradients of a function against a reference in float64.

The reference runs in the tested dtype and in float64. The difference is the error of that dtype. The error of the
function may be at most SLACK times as large, element by element, plus the last bit of a result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

SLACK: Final = 2.0
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Op = Callable[..., Any]


class Overwritten(AssertionError):
    """A call wrote into its inputs, outputs or incoming gradients."""


def samples(
    *shapes: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """Return random tensors of the given shapes, the same ones every time.

    The values are multiples of 1/32 within +-4. Every floating dtype holds them exactly, so all dtypes get the same.

    >>> [tuple(tensor.shape) for tensor in samples((2, 3), (3,))]
    [(2, 3), (3,)]
    """
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(-128, 129, tuple(shape), generator=generator) / 32).to(device, dtype) for shape in shapes]


def cast(inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the inputs with the floating ones in `dtype`."""
    return [value.to(dtype) if value.is_floating_point() else value for value in inputs]


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Return the results of an op as a tuple of tensors."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def forward(
    fn: Op, inputs: Sequence[Tensor], *, wanted: Sequence[int] = (), **options: Any
) -> tuple[dict[int, Tensor], tuple[Tensor, ...]]:
    """Call `fn` and return its leaves and its outputs.

    The inputs keep their strides. The leaves are the inputs at `wanted`, or all floating ones, by index.

    Raises:
        Overwritten: the call changed an input.
    """
    indices = wanted or [index for index, value in enumerate(inputs) if value.is_floating_point()]
    own = [value.detach() for value in inputs]
    leaves = {index: own[index].requires_grad_() for index in indices}
    with untouched({f"input {index}": value for index, value in enumerate(own)}, by="the forward"):
        outputs = as_tuple(fn(*own, **options))
    return leaves, outputs


@contextmanager
def untouched(tensors: Mapping[str, Tensor], *, by: str) -> Iterator[None]:
    """Raise Overwritten if the `with` block changes a bit of a tensor. The keys name the tensors in the message.

    Nothing is compared while a CUDA graph is captured.
    """
    if any(value.is_cuda for value in tensors.values()) and torch.cuda.is_current_stream_capturing():
        yield
        return
    before = {name: value.detach().clone() for name, value in tensors.items()}
    yield
    for name, value in tensors.items():
        if not torch.equal(_bits(value), _bits(before[name])):
            raise Overwritten(f"{by} overwrote {name}")


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def incoming_for(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return random incoming gradients, multiples of 1/8 within +-1, the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(-8, 9, out.shape, generator=generator).div(8).to(out) for out in outputs]


def backward(
    leaves: dict[int, Tensor], outputs: Sequence[Tensor], incoming: Sequence[Tensor], *, retain_graph: bool = False
) -> dict[str, Tensor]:
    """Return outputs as y0, y1, ... and gradients as d0, d1, ... by the index of their input; zero if there is none.

    Args:
        leaves: from `forward`.
        outputs: from `forward`.
        incoming: a gradient for each output.
        retain_graph: whether another backward will follow.

    Raises:
        Overwritten: backward changed a leaf, an output or an incoming gradient.
    """
    named = {f"y{index}": out.detach() for index, out in enumerate(outputs)}
    reached = [index for index, out in enumerate(outputs) if out.requires_grad]
    if not reached:
        return named | {f"d{index}": torch.zeros_like(leaf) for index, leaf in leaves.items()}
    read = {f"input {index}": leaf for index, leaf in leaves.items()} | named
    read |= {f"the gradient of y{index}": gradient for index, gradient in enumerate(incoming)}
    with untouched(read, by="the backward"):
        gradients = torch.autograd.grad(
            [outputs[index] for index in reached],
            list(leaves.values()),
            [incoming[index] for index in reached],
            retain_graph=retain_graph,
            allow_unused=True,
            materialize_grads=True,
        )
    return named | {f"d{index}": gradient for index, gradient in zip(leaves, gradients, strict=True)}


def results(fn: Op, inputs: Sequence[Tensor], *, wanted: Sequence[int] = (), **options: Any) -> dict[str, Tensor]:
    """Return outputs and gradients of `fn`, as `backward` names them, for fixed random incoming gradients."""
    leaves, outputs = forward(fn, inputs, wanted=wanted, **options)
    return backward(leaves, outputs, incoming_for(outputs))


def assert_as_good_as(
    form: Op, reference: Op, inputs: Sequence[Tensor], *, wanted: Sequence[int] = (), **options: Any
) -> None:
    """Raise unless `form` errs at most SLACK times as much as the reference, both against the reference in float64.

    Args:
        form: takes the inputs and the options; returns a tensor or several.
        reference: the same function in plain torch.
        inputs: of any dtypes; only floating ones have gradients.
        wanted: indices of the inputs that need a gradient; all floating ones if empty.
        options: for both.

    Raises:
        AssertionError: values, gradients, their dtypes or their shapes differ; the text says which, and by how much.

    >>> assert_as_good_as(lambda x: x * torch.sigmoid(x), torch.nn.functional.silu, samples((3, 5)))
    >>> assert_as_good_as(lambda x: x * x.sigmoid().round(decimals=3), torch.nn.functional.silu, samples((3, 5)))
    Traceback (most recent call last):
        ...
    AssertionError: y0: error 0.00..., allowed ...
    """
    exact = results(reference, cast(inputs, torch.float64), wanted=wanted, **options)
    plain = results(reference, inputs, wanted=wanted, **options)
    compare(results(form, inputs, wanted=wanted, **options), plain, exact, inputs)


def compare(
    got: dict[str, Tensor],
    plain: dict[str, Tensor],
    exact: dict[str, Tensor],
    inputs: Sequence[Tensor],
    *,
    where: str = "",
    slack: float = SLACK,
) -> None:
    """Raise unless `got` errs at most `slack` times as much as `plain` does, both against `exact`, value by value.

    Also allowed are the mean error of the reference beyond a last rounding; the last bit of a result, in the coarsest
    dtype of the inputs; and the error of a sum of numbers near one, in float32 at least.

    Where `plain` and `exact` are both infinite or NaN, `got` must equal one of them. Where only one is, `got` may equal
    either.

    Args:
        got: results of the function.
        plain: results of the reference.
        exact: results of the reference in float64.
        inputs: the inputs of the function and of `plain`.
        where: start of the error text.
        slack: the whole tolerance is proportional to it.
    """
    single = torch.finfo(torch.float32).eps
    coarse = max((torch.finfo(value.dtype).eps for value in inputs if value.is_floating_point()), default=single)
    fine = min(coarse, single)
    assert got.keys() == exact.keys(), f"{where}wanted {', '.join(exact)}, got {', '.join(got)}"
    for name, value in got.items():
        expected = plain[name]
        assert value.dtype == expected.dtype, f"{where}{name}: wanted {expected.dtype}, got {value.dtype}"
        assert value.shape == expected.shape, f"{where}{name}: wanted {[*expected.shape]}, got {[*value.shape]}"
        if not value.numel():
            continue
        got_wide, plain_wide, exact_wide = value.double(), expected.double(), exact[name].double()
        truth = torch.where(exact_wide.isfinite(), exact_wide, plain_wide)
        is_number = truth.isfinite()
        size = truth.abs().where(is_number, 0)
        error = (got_wide - truth).abs()
        both = plain_wide.isfinite() & exact_wide.isfinite()
        own = (plain_wide - exact_wide).abs().where(both, 0)
        # An error beyond a last rounding comes from earlier roundings, which affect other elements in another function.
        on_the_way = (own - coarse / 2 * size).clamp(min=0).mean()
        allowed = SLACK * (own + on_the_way)
        # A result has one more rounding at most, by half a unit; a gradient is a sum of such results. A gradient that
        # is 0 for all inputs (above the diagonal of a mask) has no such sums.
        rounded_often = size + 4 * size.sum() / size.count_nonzero().clamp(min=1) if name.startswith("d") else 0
        allowed += coarse / 2 * (size + rounded_often)
        allowed += 8 * fine * (1 + size.max())
        allowed *= slack / SLACK
        is_same = _same(got_wide, plain_wide) | _same(got_wide, exact_wide)
        strange = (~is_number & ~is_same).flatten()
        index = int(strange.int().argmax())
        message = f"{where}{name}: wanted {truth.flatten()[index]:.3g}, got {got_wide.flatten()[index]:.3g}"
        assert not strange.any(), message
        is_good = (error <= allowed) | (is_same & ~both) | ~is_number
        worst = int((error - allowed).where(~is_good, -torch.inf).argmax())
        message = f"{where}{name}: error {error.flatten()[worst]:.3g}, allowed {allowed.flatten()[worst]:.3g}"
        assert bool(is_good.all()), message


def _same(first: Tensor, second: Tensor) -> Tensor:
    return (first == second) | (first.isnan() & second.isnan())
