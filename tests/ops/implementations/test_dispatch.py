import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers import ops
from fuselayers.ops.implementations import dispatch as dispatch_module
from fuselayers.ops.implementations.compiled import why_not_compiled
from fuselayers.ops.implementations.dispatch import run, second_order, takes_kernels
from fuselayers.ops.implementations.launch import INTERPRETED, launch, why_no_kernels
from fuselayers.partition import BackendUnavailableError, fuse, saved_bytes
from fuselayers.testing import check_transforms
from fuselayers.testing.meter import KernelFault, Launch
from tests.ops.cases import CASES, Case, all_cases, marks_of, one_of_each_every_day
from tests.ops.contract import (
    CHECKS,
    DEVICE,
    SHAPES,
    assert_as_good_as,
    check_dynamic,
    check_fused,
    check_layouts,
    check_mixed_dtypes,
    seed_of,
    tensors,
)

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
on_kernels = pytest.mark.kernels
FAR_APART = (
    "dropout",
    "bias_activation_dropout, gelu",
    "bias_dropout_residual",
    "gated_activation, packed",
    "bias_dropout_residual_layer_norm, prenorm",
    "softmax",
)


def triton_form(case: Case) -> Any:
    return partial(case.op, backend="triton")


class TestChoice:
    def test_the_formula_on_the_cpu_and_where_it_is_asked_for(self) -> None:
        x = torch.randn(2, 8)
        assert not takes_kernels("auto", x)
        assert not takes_kernels("eager", x, None)

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
    def test_a_dtype_that_they_do_not_know(self) -> None:
        with pytest.raises(RuntimeError, match=r"^backend 'triton' cannot take this call: its kernels are for"):
            ops.gated_activation(torch.ones(2, 8, dtype=torch.float64, device=DEVICE), backend="triton")

    @on_kernels
    def test_a_transform(self) -> None:
        x = torch.ones(3, 2, 8, device=DEVICE)
        form = partial(ops.gated_activation, backend="triton")
        with pytest.raises(RuntimeError, match=r"cannot take this call: inside a transform of torch.func; use"):
            torch.vmap(form)(x)

    @on_kernels
    def test_a_subclass(self) -> None:
        class Mine(Tensor):
            pass

        x = torch.ones(2, 8, device=DEVICE)
        assert takes_kernels("triton", x, nn.Parameter(x))
        with pytest.raises(RuntimeError, match=r"cannot take this call: a Mine has rules of its own; use"):
            takes_kernels("triton", x.as_subclass(Mine))


@on_kernels
@all_cases
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_match_the_reference(shape: tuple[int, ...], dtype: torch.dtype, case: Case) -> None:
    inputs = tensors(*case.shapes(shape), dtype=dtype)
    assert_as_good_as(triton_form(case), case.reference, inputs, **case.options)


@on_kernels
@all_cases
def test_kernels_match_the_reference_over_several_tiles(case: Case) -> None:
    inputs = tensors(*case.shapes((9, 2500)), dtype=torch.bfloat16)
    assert_as_good_as(triton_form(case), case.reference, inputs, **case.options)


@on_kernels
@pytest.mark.parametrize("width", [8192, 9001, 12288])
@pytest.mark.parametrize("name", [name for name in CASES if "norm" in name])
def test_rows_of_any_length(name: str, width: int) -> None:
    case = CASES[name]
    assert_as_good_as(triton_form(case), case.reference, tensors(*case.shapes((3, width))), **case.options)


@on_kernels
@pytest.mark.parametrize(
    ("check", "case"),
    [
        # Two of the checks launch a hundred kernels each.
        pytest.param(
            *(check, case),
            id=f"{check.__name__}-{name}",
            marks=marks_of(name) if check in (check_layouts, check_mixed_dtypes) else (),
        )
        for name, case in CASES.items()
        for check in CHECKS
    ],
)
def test_contract(check: Any, case: Case) -> None:
    said = check(triton_form(case), case.reference, tensors(*case.shapes((6, 9))), **case.options)
    if said is not None:
        assert check is check_transforms
        assert said.count("raises RuntimeError: backend 'triton' cannot take this call: inside a transform") == 2


@on_kernels
@one_of_each_every_day
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_kernels_inside_a_compiled_function(backend: str, case: Case) -> None:
    inputs = tensors(*case.shapes((6, 20)))
    check_fused(triton_form(case), case.reference, inputs, backend=backend, **case.options)


@on_kernels
@one_of_each_every_day
def test_dynamic_shapes(case: Case) -> None:
    check_dynamic(triton_form(case), case.reference, lambda shape: tensors(*case.shapes(shape)), **case.options)


@on_kernels
@pytest.mark.skipif(not INTERPRETED, reason="bytes are counted in Triton's interpreter")
class Subclass(Tensor):
    pass


def served(x: Tensor, *, backend: str = "auto", compiled_from: int | None = 64) -> str:
    """Which implementation serves a call."""
    name: str = run(backend, lambda x: "formula", lambda x: "compiled", (x,), compiled_from=compiled_from)
    return name


@pytest.mark.skipif(why_not_compiled(torch.device("cpu")) is not None, reason="nothing can be compiled here")
class TestOnACPU:
    """Which implementation "auto" takes on a CPU follows from the arguments and from torch's settings alone."""

    def test_the_compiled_implementation_from_a_number_of_elements_on(self) -> None:
        assert served(torch.ones(8, 8)) == "compiled"
        assert served(torch.ones(7, 9)) == "formula"
        assert served(torch.ones(8, 8), compiled_from=None) == "formula"
        assert served(torch.ones(8, 8), backend="eager") == "formula"

    def test_the_formula_for_float64_subclasses_and_transforms(self) -> None:
        assert served(torch.ones(8, 8, dtype=torch.float64)) == "formula"
        assert served(torch.ones(8, 8).as_subclass(Subclass)) == "formula"
        inside = []
        torch.vmap(lambda x: (inside.append(served(x)), x)[1])(torch.ones(2, 8, 8))
        assert inside == ["formula"]

    def test_the_formula_where_torch_shall_be_deterministic(self) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            assert served(torch.ones(8, 8)) == "formula"
        finally:
            torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("name", ["dropout", "rms_norm", "gated_activation", "rotary"])
    def test_ops_that_gain_by_it(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert compiles(name, monkeypatch)

    @pytest.mark.parametrize("name", ["layer_norm", "softmax", "residual_layer_norm"])
    def test_ops_that_are_one_kernel_of_torchs(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not compiles(name, monkeypatch)


def compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a large call of an op on a CPU takes the compiled implementation."""
    x, weight = torch.ones(512, 512), torch.ones(512)
    calls: dict[str, Any] = {
        "dropout": lambda: ops.dropout(x, 0.5),
        "gated_activation": lambda: ops.gated_activation(x, x),
        "layer_norm": lambda: ops.layer_norm(x, weight=weight),
        "residual_layer_norm": lambda: ops.residual_layer_norm(x, x, weight=weight),
        "rms_norm": lambda: ops.rms_norm(x, weight=weight),
        "rotary": lambda: ops.rotary(x, x, x[:, :256], x[:, :256]),
        "softmax": lambda: ops.softmax(x),
    }
    asked: list[bool] = []

    def can_compile() -> bool:  # the last condition
        asked.append(True)
        return False  # nothing is compiled for the answer

    monkeypatch.setattr(dispatch_module, "can_compile", can_compile)
    calls[name]()
    return asked == [True]


@on_kernels
class TestBytes:
    @all_cases
    def test_kernels_move_what_their_docstrings_say(self, case: Case, launches: list[Launch]) -> None:
        if case.floor is None:
            pytest.skip("a test of the op says what it moves")
        inputs = [value.requires_grad_() for value in tensors(*case.shapes((100, 128)), dtype=torch.bfloat16)]
        vectors = [value for value in inputs if value.dim() == 1]
        rows, size = inputs[0].shape[0], inputs[0].nbytes
        for floor, moved in zip(case.floor, self.launched(case, inputs, launches), strict=True):
            got = sum(launch.loaded + launch.stored for launch in moved)
            # For each row two statistics and a seed; for each program every vector, and a float32 sum for its gradient.
            beside = 16 * rows + sum(launch.programs * 3 * value.nbytes for launch in moved for value in vectors)
            assert floor * size <= got <= 1.1 * floor * size + beside, moved

    @pytest.mark.parametrize(
        ("name", "forward", "backward"),
        [
            # x three times, y; dy and x three times, dx. For every row two vectors forward, one twice backward.
            ("layer_norm", 4 + 2, 7 + 2),
            # x, residual and s, which is read twice, and y; dy and s three times, dx twice, dresidual. Three vectors.
            ("bias_dropout_residual_layer_norm, post", 6 + 3, 9 + 2),
        ],
    )
    def test_rows_above_8192_are_read_again(
        self, name: str, forward: int, backward: int, launches: list[Launch]
    ) -> None:
        case = CASES[name]
        inputs = [value.requires_grad_() for value in tensors(*case.shapes((5, 9000)), dtype=torch.bfloat16)]
        for floor, moved in zip((forward, backward), self.launched(case, inputs, launches), strict=True):
            got = sum(launch.loaded + launch.stored for launch in moved)
            sums = sum(launch.traffic["partial_ptr"].stored for launch in moved if "partial_ptr" in launch.traffic)
            assert floor * inputs[0].nbytes <= got - sums <= 1.001 * floor * inputs[0].nbytes

    @staticmethod
    def launched(case: Case, inputs: list[Tensor], launches: list[Launch]) -> tuple[list[Launch], list[Launch]]:
        """Forward's launches, and backward's."""
        outputs = case.op(*inputs, **case.options, backend="triton")
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        forward = launches.copy()
        torch.autograd.grad(outputs, inputs, [torch.ones_like(out) for out in outputs])
        return forward, launches[len(forward) :]


@on_kernels
@all_cases
def test_kernels_keep_no_more_than_they_say(case: Case) -> None:
    inputs = [value.requires_grad_() for value in tensors(*case.shapes((64, 128)))]
    vectors = [value for value in inputs if value.dim() == 1]
    kept = saved_bytes(partial(triton_form(case), **case.options), *inputs, parameters=vectors)
    rows = 64 * 2 * 4
    assert case.kept * inputs[0].nbytes <= kept <= case.kept * inputs[0].nbytes + rows + 8


@on_kernels
@pytest.mark.parametrize("name", ["bias_activation_dropout", "dropout", "bias_dropout_residual", "gated_activation"])
def test_opcheck(name: str) -> None:
    x, bias = torch.randn(3, 5, device=DEVICE), torch.randn(5, device=DEVICE)
    seed, of_torch = seed_of(), torch.ops.fuselayers
    calls: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {
        "dropout": [(of_torch.dropout, (x, seed, None, 0, 0.3))],
        "bias_activation_dropout": [
            (of_torch.bias_activation_dropout, (x, bias, seed, None, 0, "gelu", 0.3)),
            (of_torch.bias_activation_dropout, (x, None, None, None, 0, None, 0.0)),
            (
                of_torch.bias_activation_dropout_backward,
                (x, x, bias, seed, None, 0, "gelu", 0.3, torch.float32, torch.float32),
            ),
            (
                of_torch.bias_activation_dropout_backward,
                (x, None, None, seed, torch.arange(3, device=DEVICE), 8, None, 0.3, torch.bfloat16, None),
            ),
        ],
        "bias_dropout_residual": [(of_torch.bias_dropout_residual, (x, x, bias, seed, None, 0, 0.3))],
        "gated_activation": [
            (of_torch.gated_activation, (x, x, "gelu")),
            (of_torch.gated_activation, (torch.randn(3, 6, device=DEVICE), None, None)),
            (of_torch.gated_activation_backward, (x, x, x, "gelu")),
            (of_torch.gated_activation_backward, (x, torch.randn(3, 10, device=DEVICE), None, "silu")),
        ],
    }
    for op, arguments in calls[name]:
        torch.library.opcheck(op.default, arguments)


@on_kernels
def test_one_mask_in_every_form() -> None:
    x = torch.ones(7, 129, device=DEVICE)
    masks = [ops.dropout(x, 0.4, seed=seed_of(), backend=backend) for backend in ("eager", "triton")]
    compiled = fuse(lambda x: ops.dropout(x, 0.4, seed=seed_of()), backend="inductor", fallback=())
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], compiled(x))


@on_kernels
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_what_is_not_finite_goes_through_as_in_the_formula(activation: str) -> None:
    # One by one: torch's vectorised gelu on the CPU gives NaN for inf, its scalar one inf.
    for value in (torch.nan, torch.inf, -torch.inf, 0.0, 1e30, -1e30):
        x = torch.tensor([value], device=DEVICE, requires_grad=True)
        found = []
        for backend in ("eager", "triton"):
            y = ops.bias_activation_dropout(x, activation=activation, backend=backend)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
            found.append((y, dx))
        for got, expected in zip(found[1], found[0], strict=True):
            assert torch.equal(got.isnan(), expected.isnan()), value
            assert torch.equal(got.isinf(), expected.isinf()), value


@on_kernels
def test_one_tensor_given_twice_to_a_compiled_function() -> None:
    def gradient(form: Any) -> Tensor:
        x = torch.linspace(-2, 2, 16, device=DEVICE).view(2, 8).requires_grad_()
        return torch.autograd.grad(form(x).sum(), x)[0]

    fused = fuse(lambda x: ops.gated_activation(x, x, backend="triton"), backend="eager", fallback=(), fullgraph=True)
    torch.testing.assert_close(gradient(fused), gradient(lambda x: ops.gated_activation(x, x, backend="eager")))


@on_kernels
@pytest.mark.skipif(not INTERPRETED, reason="the interpreter alone says which address was asked for")
@pytest.mark.parametrize("width", [16, 9000])
@pytest.mark.parametrize("name", FAR_APART)
def test_rows_may_lie_further_apart_than_32_bits_can_say(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel is told that its rows are 2^31 elements apart, and asks for the right place, where there is none."""
    case, seen = CASES[name], set()

    def spy(function: Any, grid: Any, arguments: Any, constants: Any, **options: Any) -> None:
        numbers = dict(zip(function.arg_names, (*arguments, *constants), strict=True))
        # The gradients of the identity need no x.
        unread = {"x_stride"} if numbers.get("ACTIVATION", "") is None else set()
        for place, argument in enumerate(function.arg_names):
            if argument.endswith("_stride") and numbers[argument] and argument not in unread:
                far = (1 << 31) // numbers["VECTOR"] + 1
                moved = (*arguments[:place], far, *arguments[place + 1 :])
                with pytest.raises(KernelFault, match=rf"at element {far * numbers['VECTOR']} of its memory"):
                    launch(function, grid, moved, constants, **options)
                seen.add((function.__name__, argument))
        launch(function, grid, arguments, constants, **options)

    for module in list(sys.modules.values()):
        if module.__name__.startswith("fuselayers.ops.") and getattr(module, "launch", None) is launch:
            monkeypatch.setattr(module, "launch", spy)
    inputs = [value.requires_grad_() for value in tensors(*case.shapes((2, width)), dtype=torch.bfloat16)]
    outputs = triton_form(case)(*inputs, **case.options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.grad(outputs, inputs, [torch.ones_like(out) for out in outputs])
    assert len({kernel for kernel, _ in seen}) >= 2 or name == "dropout"


def test_second_order_of_inputs_that_hang_together() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x * x
    dx, dy = second_order(torch.mul, (x, y), (torch.ones(3),), (True, True))
    assert dx is not None
    assert dy is not None
    torch.testing.assert_close(dx, y)
    torch.testing.assert_close(dy, x)
    torch.testing.assert_close(torch.autograd.grad(dx.sum(), x)[0], 2 * x)


def test_second_order_of_what_is_not_asked_for() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    dx, dy = second_order(lambda x, y: x * x * y, (x, y), (torch.ones(3),), (True, False))
    assert dy is None
    assert dx is not None
    torch.testing.assert_close(torch.autograd.grad(dx.sum(), y)[0], 2 * x)


class TestSwitching:
    """One training run in several forms: the masks are the same, so the losses are those of a run in one form."""

    @staticmethod
    def losses(forms: Sequence[Any]) -> list[float]:
        """The losses of a small post-norm feedforward with dropout, each step in the form at its place."""
        torch.manual_seed(3)
        width, inner = 24, 64
        shapes = [(inner, width), (inner,), (width, inner), (width,), (width,), (width,)]
        weights = [(torch.randn(shape) / 8).to(DEVICE).requires_grad_() for shape in shapes]
        x, target = torch.randn(16, width).to(DEVICE), torch.randn(16, width).to(DEVICE)
        losses = []
        for form in forms:
            loss = (form(x, *weights) - target).square().mean()
            losses.append(loss.item())
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.data -= 0.3 * gradient
        return losses

    @staticmethod
    def block(x: Tensor, *weights: Tensor, backend: str) -> Tensor:
        up, up_bias, down, down_bias, scale, shift = weights
        hidden = ops.bias_activation_dropout(x @ up.T, up_bias, activation="gelu", p=0.2, backend=backend)
        return ops.bias_dropout_residual_layer_norm(
            hidden @ down.T, x, weight=scale, norm_bias=shift, bias=down_bias, p=0.3, backend=backend
        )

    def run_with_a_switch(self, other: Any) -> None:
        formula = partial(self.block, backend="eager")
        expected = self.losses([formula] * 8)
        assert len(set(expected)) == 8
        assert self.losses([formula] * 4 + [other] * 4) == pytest.approx(expected, rel=1e-5)
        assert self.losses([other, formula] * 4) == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_into_a_fused_function(self, backend: str) -> None:
        self.run_with_a_switch(fuse(partial(self.block, backend="auto"), backend=backend, fallback=()))

    @pytest.mark.slow
    @pytest.mark.skipif(why_not_compiled(DEVICE) is not None, reason="ops have no compiled form here")
    def test_into_the_compiled_form(self) -> None:
        self.run_with_a_switch(partial(self.block, backend="inductor"))

    @on_kernels
    def test_into_the_kernels(self) -> None:
        self.run_with_a_switch(partial(self.block, backend="triton"))
