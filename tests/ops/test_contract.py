"""Every case of `cases` passes the shared contract: as a formula, and by its kernels where they run."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from fuselayers.testing import (
    DTYPES,
    assert_as_good_as,
    check_dynamic,
    check_fused,
    check_layouts,
    check_mixed_dtypes,
    check_not_finite,
    check_poisoned,
    check_single_gradients,
    check_transforms,
)
from fuselayers.testing.comparison import as_tuple
from tests.ops.cases import CASES, EVERY_DAY, Case
from tests.ops.contract import CHECKS, SHAPES, on_cpp, on_kernels, tensors

KERNEL_DTYPES = DTYPES[:3]
PRENORM = "bias_dropout_residual_layer_norm, prenorm"
# For tests that take a second per case: a norm with all options and a mask, and an op with a packed input.
FEW = (PRENORM, "gated_activation, packed")
# The check traces a function twice per input, and masks take longest, so the norm has no dropout.
MIXED = ("residual_layer_norm", "gated_activation, packed")
# The references of these ops share no code with their formulas.
OWN_FORMULAS = tuple(name for name in EVERY_DAY if "norm" in name)
# Every day, each case runs in one dtype and shape, and one case of each op in all shapes, with the dtypes in turn.
COMMON = (2, 3, 129), torch.bfloat16
# Twice the number, so that float16 meets (1, 1025).
IN_TURNS = {(shape, KERNEL_DTYPES[2 * number % len(KERNEL_DTYPES)]) for number, shape in enumerate(SHAPES)}
# The checks that the interpreter runs every day. The others test the code around a kernel, which C++ shares.
INTERPRETED_CHECKS = (check_layouts, check_single_gradients, check_poisoned, check_not_finite)


def slow_unless(every_day: bool) -> tuple[Any, ...]:
    return () if every_day else (pytest.mark.slow,)


def named(name: str, *rest: Any, marks: tuple[Any, ...] = ()) -> Any:
    return pytest.param(
        CASES[name], *rest, marks=marks, id="-".join((name, *(getattr(part, "__name__", str(part)) for part in rest)))
    )


def numbers() -> Iterator[Any]:
    for shape in SHAPES:
        for dtype in KERNEL_DTYPES:
            for name in CASES:
                every_day = (shape, dtype) == COMMON or (name in EVERY_DAY and (shape, dtype) in IN_TURNS)
                yield named(name, shape, dtype, "triton", marks=(on_kernels, *slow_unless(every_day)))
                yield named(name, shape, dtype, "cpp", marks=on_cpp.marks)  # takes a millisecond
        for dtype in DTYPES:
            for name in OWN_FORMULAS:
                yield named(name, shape, dtype, "eager")


def with_backends(
    *rest: Any, every_day: Sequence[str] = EVERY_DAY, forms_every_day: Sequence[str] = EVERY_DAY
) -> Iterator[Any]:
    """Every case with its Triton kernels, and one case of each op with its formula and in C++."""
    for name in EVERY_DAY:
        marks = slow_unless(name in forms_every_day)
        yield named(name, *rest, "eager", marks=marks)
        yield named(name, *rest, "cpp", marks=(*on_cpp.marks, *marks))
    for name in CASES:
        yield named(name, *rest, "triton", marks=(on_kernels, *slow_unless(name in every_day)))


@pytest.mark.parametrize(("case", "shape", "dtype", "backend"), numbers())
def test_values_and_gradients(case: Case, shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    inputs = tensors(*case.shapes(shape), dtype=dtype)
    assert_as_good_as(partial(case.op, backend=backend), case.reference, inputs, **case.options)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *(named(name, "triton", marks=(on_kernels, *slow_unless(name in EVERY_DAY))) for name in CASES),
        *(named(name, "cpp", marks=(*on_cpp.marks, *slow_unless(name in EVERY_DAY))) for name in CASES),
    ],
)
def test_kernels_over_several_tiles(case: Case, backend: str) -> None:
    # C++: blocks of 16 rows, pieces of 512 columns, stretches of 4096.
    shape = (9, 2500) if backend == "triton" else (17, 4200)
    inputs = tensors(*case.shapes(shape), dtype=torch.bfloat16)
    assert_as_good_as(partial(case.op, backend=backend), case.reference, inputs, **case.options)


@on_kernels
@pytest.mark.parametrize(
    ("case", "width"),
    [
        named(name, width, marks=slow_unless(name == PRENORM and width == 9001))
        for width in (9001, 20000)  # tiles of 16384 and of 32768
        for name in CASES
        if "norm" in name
    ],
)
def test_norms_of_long_rows(case: Case, width: int) -> None:
    inputs = tensors(*case.shapes((3, width)))
    assert_as_good_as(partial(case.op, backend="triton"), case.reference, inputs, **case.options)


@pytest.mark.parametrize(
    ("case", "check", "backend"),
    [
        param
        for check in CHECKS
        for param in with_backends(
            check,
            every_day=EVERY_DAY if check in INTERPRETED_CHECKS else (),
            forms_every_day=MIXED if check is check_mixed_dtypes else EVERY_DAY,
        )
    ],
)
def test_contract(case: Case, check: Any, backend: str) -> None:
    form = partial(case.op, backend=backend)
    error = check(form, case.reference, tensors(*case.shapes((6, 9))), **case.options)
    if backend != "eager" and check is check_transforms:
        assert error.count(f"raises RuntimeError: backend {backend!r} cannot take this call: inside a transform") == 2
    else:
        assert error is None


@pytest.mark.parametrize(("case", "backend"), with_backends(every_day=(PRENORM,), forms_every_day=FEW))
def test_dynamic_shapes(case: Case, backend: str) -> None:
    form = partial(case.op, backend=backend)
    check_dynamic(form, case.reference, lambda shape: tensors(*case.shapes(shape)), **case.options)


# Inductor takes seconds per case.
@pytest.mark.parametrize(
    ("case", "compiler", "backend"),
    [
        *with_backends("eager", every_day=(PRENORM,)),
        *(named(name, "inductor", "eager", marks=slow_unless(name == PRENORM)) for name in EVERY_DAY),
        *(named(name, "inductor", "triton", marks=(on_kernels, *slow_unless(name == PRENORM))) for name in CASES),
    ],
)
def test_fused(case: Case, compiler: str, backend: str) -> None:
    form = partial(case.op, backend=backend)
    check_fused(form, case.reference, tensors(*case.shapes((6, 20))), backend=compiler, **case.options)


@pytest.mark.parametrize("name", EVERY_DAY)
def test_gradients_of_the_reference(name: str) -> None:
    case = CASES[name]
    inputs = [tensor.requires_grad_() for tensor in tensors(*case.shapes((3, 4)), dtype=torch.float64)]
    torch.autograd.gradcheck(lambda *args: case.reference(*args, **case.options), inputs)


# Each op has a separate backward, which must use the formula instead of C++.
@pytest.mark.parametrize("name", EVERY_DAY)
@pytest.mark.parametrize("backend", [on_cpp])
def test_a_transform_of_backward_takes_the_gradients_of_the_formula(name: str, backend: str) -> None:
    case = CASES[name]

    def gradients(fn: Any) -> Any:
        leaves = [tensor.requires_grad_() for tensor in tensors(*case.shapes((3, 21)))]
        outputs = as_tuple(fn(*leaves, **case.options))
        incoming = tuple(torch.randn(2, *out.shape, generator=torch.Generator().manual_seed(1)) for out in outputs)

        def backward(*dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(outputs, leaves, dy, retain_graph=True)

        by_row = torch.vmap(backward)(*incoming)
        if case.options.get("activation") == "silu":  # torch's backward of silu has no forward mode
            return by_row
        first_row = tuple(dy[0] for dy in incoming)
        return by_row, torch.func.jvp(backward, first_row, first_row)[1]

    torch.testing.assert_close(gradients(partial(case.op, backend=backend)), gradients(case.reference))
