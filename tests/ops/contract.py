"""What every op must satisfy. Each tests/ops/test_<op>.py states its cases and runs CHECKS and their kin over them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fuselayers.partition import fuse

# A form of an op may err at most twice as much as plain torch does in the same dtype, both against float64.
SLACK = 2.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((1,), (7,), (3, 5), (2, 3, 129), (1, 1025), (0, 4))

# Kernels run on a GPU, or in Triton's interpreter on the CPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Op = Callable[..., Any]
Relay = Callable[[Tensor], Tensor]


def seed_of(number: int = 5) -> Tensor:
    return torch.tensor(number * 0x9E3779B97F4A7C15 % (1 << 63), dtype=torch.int64, device=DEVICE)


def tensors(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random tensors of the given shapes, exactly representable in every dtype under test."""
    generator = torch.Generator().manual_seed(0)
    # Steps of 1/32 within +-4 are exact in bfloat16 too, so that every dtype is given the same numbers.
    return [(torch.randint(-128, 129, tuple(shape), generator=generator) / 32).to(DEVICE, dtype) for shape in shapes]


def as_it_is(x: Tensor) -> Tensor:
    return x


def results(
    fn: Op, inputs: Sequence[Tensor], *, incoming: Relay = as_it_is, wanted: Sequence[int] = (), **options: Any
) -> dict[str, Tensor]:
    """Outputs of `fn` and gradients for a fixed random incoming gradient, of the inputs at `wanted` or else of all.

    The inputs are used as they lie in memory; `incoming` lays out the incoming gradients.
    """
    places = wanted or range(len(inputs))
    leaves = [value.detach().requires_grad_(place in places) for place, value in enumerate(inputs)]
    outputs = fn(*leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randint(-8, 9, out.shape, generator=generator).div(8).to(out) for out in outputs]
    # Of "pre" and its kin one output may not depend on the only input that is asked for.
    reached = [place for place, out in enumerate(outputs) if out.requires_grad]
    found = torch.autograd.grad(
        [outputs[place] for place in reached],
        [leaves[place] for place in places],
        [incoming(gradients[place]) for place in reached],
    )
    named = {f"y{place}": out.detach() for place, out in enumerate(outputs)}
    return named | {f"d{place}": gradient for place, gradient in zip(places, found, strict=True)}


def assert_as_good_as(form: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """`form` agrees with the float64 reference at least half as well as the reference in the inputs' own dtypes does.

    Value by value. To that comes the last bit of a result, in the inputs' coarsest dtype, and what the order of a sum
    makes of numbers of the order of one, in float32 at least.
    """
    coarse = max(torch.finfo(value.dtype).eps for value in inputs)
    fine = min(coarse, torch.finfo(torch.float32).eps)
    exact = results(reference, [value.double() for value in inputs], **options)
    plain = results(reference, inputs, **options)
    got = results(form, inputs, **options)
    assert got.keys() == exact.keys()
    for name, value in got.items():
        assert value.dtype == plain[name].dtype, name
        assert value.shape == plain[name].shape, name
        if not value.numel():
            continue
        error = (value.double() - exact[name]).abs()
        allowed = SLACK * (plain[name].double() - exact[name]).abs()
        # A result is rounded once more at most, by half a unit; a gradient is a sum of such results, on another way.
        rounded_often = exact[name].abs() + 4 * exact[name].abs().mean() if name.startswith("d") else 0
        allowed += coarse / 2 * (exact[name].abs() + rounded_often)
        allowed += 8 * fine * (1 + exact[name].abs().max())
        worst = int((error - allowed).argmax())
        message = f"{name}: error {error.flatten()[worst]:.3g}, allowed {allowed.flatten()[worst]:.3g}"
        assert bool((error <= allowed).all()), message


def check_layouts(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """The op does not care how its [R, N] inputs and its incoming gradients lie in memory."""

    def transposed(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    def every_other_row(x: Tensor) -> Tensor:
        return torch.stack([x, torch.full_like(x, torch.nan)], dim=-2)[..., 0, :]

    def padded_rows(x: Tensor) -> Tensor:
        return torch.cat([x, torch.full_like(x, torch.nan)], dim=-1)[..., : x.shape[-1]]

    def every_other_value(x: Tensor) -> Tensor:
        return torch.stack([torch.full_like(x, torch.nan), x], dim=-1)[..., 1]

    def expanded(x: Tensor) -> Tensor:
        return x[:1].expand_as(x)

    for relay in (transposed, every_other_row, padded_rows, every_other_value, expanded):
        laid_out = [relay(value) if value.dim() > 1 else value for value in inputs]
        assert any(not value.is_contiguous() for value in laid_out)
        assert_as_good_as(op, reference, laid_out, **options)
        assert_as_good_as(op, reference, inputs, incoming=relay, **options)


def check_single_gradients(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """One input alone may need a gradient, whichever it is."""
    for place in range(len(inputs)):
        assert_as_good_as(op, reference, inputs, wanted=[place], **options)


def check_mixed_dtypes(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """Op, reference and traced form agree about the dtypes of results, whichever input is of another dtype."""
    names = tuple(name for name, value in options.items() if not isinstance(value, Tensor))
    fused = fuse(op, backend="eager", fallback=(), fullgraph=True, static_argnames=names)
    for most, one in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        for place in range(len(inputs)):
            mixed = [value.to(one if other == place else most) for other, value in enumerate(inputs)]
            assert_as_good_as(op, reference, mixed, **options)
            assert_as_good_as(fused, reference, mixed, **options)


def check_autocast(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """There is no matmul in an op, so autocast changes nothing."""

    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return op(*args, **kwargs)

    for dtype in (torch.float32, torch.bfloat16):
        assert_as_good_as(under_autocast, reference, [value.to(dtype) for value in inputs], **options)


def check_poisoned(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """The op reads no memory that it has not written."""

    def on_poison(*args: Any, **kwargs: Any) -> Any:
        with poisoned_memory():
            assert torch.empty(3).isnan().all()
            return op(*args, **kwargs)

    assert_as_good_as(on_poison, reference, inputs, **options)
    with poisoned_memory():  # backward too
        assert_as_good_as(op, reference, inputs, **options)


CHECKS = (check_layouts, check_single_gradients, check_mixed_dtypes, check_autocast, check_poisoned)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Have `torch.empty` and its kin return NaN, and the largest integer, instead of what was there."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_fused(op: Op, reference: Op, inputs: Sequence[Tensor], *, backend: str, **options: Any) -> None:
    """Fused in one graph, the op gives the reference's numbers, for the same seed the same mask."""
    names = tuple(name for name, value in options.items() if not isinstance(value, Tensor))
    fused = fuse(op, backend=backend, fallback=(), fullgraph=True, static_argnames=names)
    assert_as_good_as(fused, reference, inputs, **options)
    assert fused.served_by == (backend,)


def check_dynamic(op: Op, reference: Op, inputs_of: Callable[[tuple[int, int]], list[Tensor]], **options: Any) -> None:
    """One graph serves every width that is no multiple of the mask's eight lanes, one serves those that are.

    Widths up to eight are one group, and a size of one is a graph of its own for Dynamo.
    """
    fused = fuse(lambda *args: op(*args, **options), backend="eager", fallback=(), fullgraph=True, dynamic=True)

    def call(*args: Any, **_: Any) -> Any:
        return fused(*args)

    for shape in ((3, 21), (2, 16)):
        assert_as_good_as(call, reference, inputs_of(shape), **options)
    with torch.compiler.set_stance("fail_on_recompile"):
        for shape in ((7, 129), (5, 40)):
            assert_as_good_as(call, reference, inputs_of(shape), **options)
