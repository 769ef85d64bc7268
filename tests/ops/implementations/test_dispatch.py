import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuselayers import ops
from fuselayers.ops.cpu import has_kernels
from fuselayers.ops.implementations.dispatch import Op, uses_kernels
from fuselayers.ops.implementations.launch import INTERPRETED, launch, why_no_kernels
from fuselayers.partition import BackendUnavailableError, saved_bytes
from fuselayers.testing.comparison import backward, forward, incoming_for, results
from tests.ops.cases import CASES, Case, all_cases
from tests.ops.contract import DEVICE, on_cpp, on_kernels, on_triton, seed_of, tensors
from tests.testing.meter import KernelFault, Launch


class Subclass(Tensor):
    pass


class Wrapped(Tensor):
    """A subclass that wraps a tensor and has no memory."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Wrapped, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, Wrapped, func(*args, **kwargs))


def unchanged(x: Tensor) -> Tensor:
    return x


CHOICE = Op("choice", unchanged, torch.neg, cpu_from=64)


in_cpp = pytest.mark.skipif(INTERPRETED or not has_kernels(), reason="no kernels in C++ here")


class TestErrors:
    def test_an_unknown_backend(self) -> None:
        with pytest.raises(ValueError, match=r"^no backend 'trition'; did you mean 'triton'\? there are: auto"):
            ops.dropout(torch.ones(2, 8), 0.5, backend="trition")

    @pytest.mark.skipif(INTERPRETED or DEVICE.type != "cpu", reason="the kernels run here")
    def test_kernels_that_cannot_run_here(self) -> None:
        reason = r"Triton has no compiler for cpu; move the tensors to a GPU, or set TRITON_INTERPRET=1 to debug"
        assert why_no_kernels(torch.device("cpu")) == reason
        with pytest.raises(BackendUnavailableError, match=rf"^backend 'triton' cannot run here: {reason}; or"):
            ops.gated_activation(torch.ones(2, 8), backend="triton")

    @on_kernels
    def test_unsupported_dtype(self) -> None:
        with pytest.raises(RuntimeError, match=r"^backend 'triton' cannot take this call: its kernels are for"):
            ops.gated_activation(torch.ones(2, 8, dtype=torch.float64, device=DEVICE), backend="triton")

    @on_kernels
    def test_a_subclass(self) -> None:
        x = torch.ones(2, 8, device=DEVICE)
        assert uses_kernels("triton", x, nn.Parameter(x))
        with pytest.raises(RuntimeError, match=r"a Subclass may override torch's ops, which kernels do not call; use"):
            uses_kernels("triton", x.as_subclass(Subclass))


def chosen(x: Tensor, *, backend: str = "auto", torch_is_as_fast: bool = False) -> str:
    """The implementation that a call takes."""
    return "formula" if CHOICE(backend, (x,), torch_is_as_fast=torch_is_as_fast) is x else "kernels"


@in_cpp
class TestOnACPU:
    """On a CPU, "auto" chooses an implementation by the arguments and torch's settings alone."""

    def test_the_kernels_from_a_number_of_elements_on(self) -> None:
        assert chosen(torch.ones(4, 16)) == "kernels"
        assert chosen(torch.ones(3, 21)) == "formula"
        assert chosen(torch.ones(8, 8)) == "formula"  # narrow rows
        assert chosen(torch.ones(8, 8), backend="cpp") == "kernels"
        assert chosen(torch.ones(4, 16), torch_is_as_fast=True) == "formula"
        assert chosen(torch.ones(4, 16), backend="eager") == "formula"

    def test_the_formula_for_float64_subclasses_and_transforms(self) -> None:
        assert chosen(torch.ones(8, 8, dtype=torch.float64)) == "formula"
        assert chosen(torch.ones(8, 8).as_subclass(Subclass)) == "formula"
        inside = []
        torch.vmap(lambda x: (inside.append(chosen(x)), x)[1])(torch.ones(2, 8, 8))
        assert inside == ["formula"]

    # Each of the three ops passes dy to C++ in a separate backward, and each kind is a different flag of a tensor.
    @pytest.mark.parametrize("kind", ["negated", "subclass", "zeros"])
    @pytest.mark.parametrize("name", ["dropout", "cross_entropy", "rotary"])
    def test_gradients_of_other_kinds(self, name: str, kind: str) -> None:
        """The memory of such a gradient does not hold its values, or it has no memory."""
        x = torch.randn(4, 8, requires_grad=True)
        calls: dict[str, Any] = {
            "dropout": lambda backend: ops.dropout(x, 0.4, seed=seed_of(), backend=backend),
            "cross_entropy": lambda backend: ops.cross_entropy(x, torch.arange(4), reduction="sum", backend=backend),
            "rotary": lambda backend: ops.rotary(x, x, x[:, :4].detach(), x[:, 4:].detach(), backend=backend)[0],
        }
        gradients = []
        for backend in ("cpp", "eager"):
            y = calls[name](backend)
            dy = torch.full_like(y, 2.0, requires_grad=False)
            if kind == "negated":
                dy = torch._neg_view(dy)
            elif kind == "zeros":
                dy = torch._efficientzerotensor(y.shape)
            else:
                dy = Wrapped(dy)
            (dx,) = torch.autograd.grad(y, x, dy)
            gradients.append(dx.inner if isinstance(dx, Wrapped) else dx + 0)
        torch.testing.assert_close(*gradients)


@in_cpp
def test_a_hook_on_saved_tensors_may_return_a_lazily_negated_one() -> None:
    gradients = []
    for unpack in (lambda saved: saved, lambda saved: torch._neg_view(-saved) if saved.dim() == 2 else saved):
        x, weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), torch.ones(64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            ops.rms_norm(x, weight=weight, backend="cpp").square().sum().backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients)


def test_errors_in_cpp() -> None:
    x = torch.ones(2, 8, device="meta")
    with pytest.raises(
        BackendUnavailableError, match=r"^backend 'cpp' cannot run here: the kernels in C\+\+ are for a C"
    ):
        ops.gated_activation(x, backend="cpp")
    with pytest.raises(ValueError, match=r"^no backend 'inductor'; there are: .*; fuse\(op, backend=\.\.\.\) takes"):
        ops.dropout(torch.ones(2, 8), 0.5, backend="inductor")


@on_kernels
@pytest.mark.skipif(not INTERPRETED, reason="bytes are counted in Triton's interpreter")
@all_cases
def test_kernels_move_the_bytes_of_their_docstrings(case: Case, launches: list[Launch]) -> None:
    inputs = tensors(*case.shapes((25, 128)), dtype=torch.bfloat16)
    leaves, outputs = forward(partial(case.op, backend="triton"), inputs, **case.options)
    in_forward = launches.copy()
    backward(leaves, outputs, incoming_for(outputs))
    vectors = [value for value in inputs if value.dim() == 1]
    rows, size = inputs[0].shape[0], inputs[0].nbytes
    for floor, moved in zip(case.floor, (in_forward, launches[len(in_forward) :]), strict=True):
        got = sum(launch.loaded + launch.stored for launch in moved)
        # For each row two statistics and a seed; for each program every vector, and a float32 sum for its gradient.
        beside = 16 * rows + sum(launch.programs * 3 * value.nbytes for launch in moved for value in vectors)
        assert floor * size <= got <= 1.1 * floor * size + beside, moved


@pytest.mark.parametrize("backend", [on_cpp, on_triton])
@all_cases
def test_kernels_save_what_the_case_says(case: Case, backend: str) -> None:
    inputs = [value.requires_grad_() for value in tensors(*case.shapes((16, 128)))]
    vectors = [value for value in inputs if value.dim() == 1]
    kept = saved_bytes(partial(case.op, **case.options, backend=backend), *inputs, parameters=vectors)
    rows = 16 * 2 * 4
    assert case.saved * inputs[0].nbytes <= kept <= case.saved * inputs[0].nbytes + rows + 8


# Each activation is written twice, in C++ and in Triton, and its derivative too.
@pytest.mark.parametrize("backend", [on_cpp, on_triton])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_nan_and_inf_propagate_as_in_the_formula(activation: str, backend: str) -> None:
    # Single values, since torch's vectorised gelu on the CPU gives NaN for inf. A NaN may have any low bits.
    odd_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    for value in (torch.nan, odd_nan, torch.inf, -torch.inf, 0.0, 1e30, -1e30):
        x = torch.as_tensor(value).reshape(1).to(DEVICE, copy=True).requires_grad_()
        by_backend = []
        for form in ("eager", backend):
            y = ops.bias_activation_dropout(x, activation=activation, backend=form)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
            by_backend.append((y, dx))
        for got, expected in zip(by_backend[1], by_backend[0], strict=True):
            assert torch.equal(got.isnan(), expected.isnan()), value
            assert torch.equal(got.isinf(), expected.isinf()), value


def a_step_of_rotary() -> None:
    q, k, cos, sin = tensors((2, 1, 2, 16), (2, 2, 2, 16), (2, 2, 8), (2, 2, 8), dtype=torch.bfloat16)
    ops.rotary(q, k, cos, sin, backend="triton")


def a_step_of(case: Case) -> Callable[[], Any]:
    inputs = tensors(*case.shapes((2, 16)), dtype=torch.bfloat16)
    return partial(results, partial(case.op, backend="triton"), inputs, **case.options)


FAR_APART = {
    "rotary": (a_step_of_rotary, 3),
    "dropout": (a_step_of(CASES["dropout"]), 1),
    "bias_activation_dropout": (a_step_of(CASES["bias_activation_dropout, gelu"]), 3),
    "bias_dropout_residual": (a_step_of(CASES["bias_dropout_residual"]), 3),
    "gated_activation": (a_step_of(CASES["gated_activation, packed"]), 6),
    "norm": (a_step_of(CASES["bias_dropout_residual_layer_norm, prenorm"]), 5),
}


@on_kernels
@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter reports addresses")
@pytest.mark.parametrize(("step", "num_strides"), list(FAR_APART.values()), ids=FAR_APART)
def test_strides_beyond_32_bits(step: Callable[[], Any], num_strides: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stride of 2^31 elements each kernel computes the right address, which is out of bounds."""
    seen = set()

    def spy(function: Any, grid: Any, arguments: Any, constants: Any, **options: Any) -> None:
        numbers = dict(zip(function.arg_names, (*arguments, *constants), strict=True))
        # The gradients of the identity need no x.
        unread = {"x_stride"} if "dy_ptr" in numbers and numbers.get("ACTIVATION", "") is None else set()
        strides = {name for name in numbers if name.endswith("_stride")} | {"x0_batch", "x0_token", "x1_head"}
        for place, argument in enumerate(function.arg_names):
            if argument in strides - unread and numbers[argument]:
                far = (1 << 31) // numbers["VECTOR"] + 1
                moved = (*arguments[:place], far, *arguments[place + 1 :])
                with pytest.raises(KernelFault, match=rf"at element {far * numbers['VECTOR']} of its memory"):
                    launch(function, grid, moved, constants, **options)
                seen.add((function.__name__, argument))
        launch(function, grid, arguments, constants, **options)

    for module in list(sys.modules.values()):
        if module.__name__.startswith("fuselayers.ops.") and getattr(module, "launch", None) is launch:
            monkeypatch.setattr(module, "launch", spy)
    step()
    assert len(seen) == num_strides
