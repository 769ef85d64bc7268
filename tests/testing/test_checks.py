"""The checks find the faults that they are made for."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import testing
from fuselayers.partition import BackendUnavailableError
from fuselayers.testing import NotApplicable, samples
from tests.cuda_graphs import check_cuda_graph

IS_CUDA = torch.cuda.is_available()


def triple(x: Tensor, y: Tensor) -> Tensor:
    return x * 3 + y


class _NeedsBothGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return triple(x, y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy * (3 if all(ctx.needs_input_grad) else 4), dy


def reads_unwritten_memory(x: Tensor, y: Tensor) -> Tensor:
    return triple(x, y) + torch.empty_like(x).isnan()


def keeps_the_first_dtype(x: Tensor, y: Tensor) -> Tensor:
    return triple(x, y).to(x.dtype)


def is_autocast(x: Tensor, y: Tensor) -> Tensor:
    return triple((x / 3) @ torch.eye(x.shape[-1], dtype=x.dtype) * 3, y)


def hides_nan(x: Tensor, y: Tensor) -> Tensor:
    return triple(x, y).nan_to_num(posinf=torch.inf, neginf=-torch.inf)


def turns_infinity(x: Tensor, y: Tensor) -> Tensor:
    out = triple(x, y)
    return torch.where(out.isinf(), out.abs(), out)


def breaks_the_graph(x: Tensor, y: Tensor) -> Tensor:
    return triple(x, y) if x.sum() > 1e9 else triple(x, y) + 0


def by_the_batch(x: Tensor, y: Tensor) -> Tensor:
    return triple(x, y) + float(torch._C._functorch.is_batchedtensor(x))


def when_fused(x: Tensor, y: Tensor) -> Tensor:
    return triple(x, y) + float(torch.compiler.is_compiling())


@pytest.mark.parametrize(
    ("check", "faulty", "problem"),
    [
        (testing.check_single_gradients, _NeedsBothGradients.apply, "d0: error"),
        (testing.check_poisoned, reads_unwritten_memory, "y0: error 1, allowed"),
        (testing.check_mixed_dtypes, keeps_the_first_dtype, "y0: wanted torch.float32, got torch.bfloat16"),
        (testing.check_autocast, is_autocast, "y0: wanted torch.float32, got torch.bfloat16|y0: error"),
        (testing.check_not_finite, hides_nan, r"y0 for nan in the first input, at \[0, 0\]: isnan differs"),
        (testing.check_not_finite, turns_infinity, r"y0 for -inf in the first input, at \[0, 0\]: isposinf differs"),
        (testing.check_transforms, by_the_batch, "torch.vmap: y0: error 1, allowed"),
        (partial(testing.check_fused, backend="eager"), when_fused, "y0: error 1, allowed"),
    ],
)
def test_faults_are_seen(check: Callable[..., Any], faulty: Callable[..., Tensor], problem: str) -> None:
    inputs = samples((6, 9), (6, 9))
    assert check(triple, triple, inputs) is None
    with pytest.raises(AssertionError, match=f"^({problem})"):
        check(faulty, triple, inputs)


def test_a_graph_break_is_seen() -> None:
    inputs = samples((6, 9), (6, 9))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        testing.check_fused(breaks_the_graph, triple, inputs, backend="eager")


def test_more_compilations_than_dynamos_limit() -> None:
    for size in range(1, 12):
        testing.check_fused(triple, triple, samples((2, 2 + size), (2, 2 + size)), backend="eager")


class TestDoubleBackward:
    def cube(self, backward: Callable[[Tensor, Tensor], Tensor], *, once: bool = False) -> Callable[[Tensor], Tensor]:
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return x**3

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Tensor:
                return backward(dy, ctx.saved_tensors[0])

        if once:
            Cube.backward = staticmethod(torch.autograd.function.once_differentiable(Cube.backward))  # type: ignore
        return Cube.apply  # type: ignore[no-any-return]

    def check(self, form: Callable[[Tensor], Tensor]) -> str | None:
        return testing.check_double_backward(form, lambda x: x**3, samples((3, 5)))

    def test_a_right_second_derivative_passes(self) -> None:
        assert self.check(self.cube(lambda dy, x: dy * 3 * x**2)) is None

    def test_an_error_passes_and_is_reported(self) -> None:
        said = self.check(self.cube(lambda dy, x: dy * 3 * x**2, once=True))
        assert said == (
            "raises RuntimeError: trying to differentiate twice a function that was marked with @once_differentiable"
        )

    def test_a_wrong_second_derivative_is_seen(self) -> None:
        with pytest.raises(AssertionError, match=r"^dd0: error"):
            self.check(self.cube(lambda dy, x: dy * 3 * x.detach() ** 2))


def test_a_graph_for_every_size_is_seen() -> None:
    def wants_one_size(x: Tensor, y: Tensor) -> Tensor:
        return triple(x, y) * (x.shape[-1] / int(x.shape[-1]) if x.shape[-1] not in (129, 27) else 1)

    def inputs_of(shape: tuple[int, int]) -> list[Tensor]:
        return samples(shape, shape)

    for inputs in (inputs_of, inputs_of((6, 9))):
        testing.check_dynamic(triple, triple, inputs)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            testing.check_dynamic(wants_one_size, triple, inputs)


def test_a_backend_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: Any, **__: Any) -> None:
        raise BackendUnavailableError("backend 'inductor' needs a C++ compiler")

    inputs = samples((3, 5), (3, 5))
    testing.check_fused(triple, triple, inputs, backend="eager")
    monkeypatch.setattr("fuselayers.testing.checks.fuse", unavailable)
    with pytest.raises(NotApplicable, match=r"^backend 'inductor' needs a C\+\+ compiler$"):
        testing.check_fused(triple, triple, inputs, backend="inductor")


@pytest.mark.skipif(not IS_CUDA, reason="needs a CUDA GPU")
def test_a_number_that_is_read_while_a_graph_is_captured_is_seen() -> None:
    inputs = samples((3, 5), (3, 5), device="cuda")
    check_cuda_graph(triple, triple, inputs)
    with pytest.raises(torch.AcceleratorError, match="captur"):
        check_cuda_graph(lambda x, y: triple(x, y) * (1 if x.sum().item() else 2), triple, inputs)
