import math
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fuselayers import ops
from fuselayers.ops.cross_entropy import cross_entropy_reference
from fuselayers.ops.implementations.compiled import _Compiled, compiled, why_not_compiled
from fuselayers.ops.rotary import rotary_reference
from fuselayers.partition import BackendUnavailableError, FallbackWarning, saved_bytes
from tests.ops.cases import CASES
from tests.ops.contract import (
    assert_as_good_as,
    check_layouts,
    check_single_gradients,
    tensors,
    where_inductor_compiles,
)

pytestmark = where_inductor_compiles
FEW = (
    "dropout",
    "bias_activation_dropout, gelu",
    "bias_dropout_residual",
    "gated_activation, packed",
    "layer_norm",
    "bias_dropout_residual_layer_norm, prenorm",
    "bias_dropout_residual_rms_norm, pre",
    "softmax, masked and causal",
)
WITH_ONE = tuple(name for name in CASES if any(name.startswith(few.split(",")[0]) for few in FEW) or "norm" in name)
# Each op and dtype is compiled, forward and backward, which takes seconds.
IN_BFLOAT16 = ("layer_norm", "bias_dropout_residual_rms_norm, pre")
EVERY_DAY = {(name, torch.bfloat16 if name in IN_BFLOAT16 else torch.float32) for name in FEW}


def compiled_once(*dtypes: torch.dtype) -> Any:
    """For every case and dtype, marked slow but for a few."""
    pairs = [(name, dtype) for name in WITH_ONE for dtype in dtypes]
    marked = [
        pytest.param(*pair, marks=() if pair in EVERY_DAY else (pytest.mark.slow,), id=f"{pair[0]}, {pair[1]}")
        for pair in pairs
    ]
    return pytest.mark.parametrize(("name", "dtype"), marked)


def compiled_form(name: str) -> Any:
    return partial(CASES[name].op, backend="inductor")


@compiled_once(torch.float32, torch.bfloat16, torch.float64)
def test_compiled_matches_the_reference(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs = tensors(*case.shapes((2, 3, 129)), dtype=dtype)
    assert_as_good_as(compiled_form(name), case.reference, inputs, **case.options)


@pytest.mark.parametrize(
    "name",
    [
        "bias_activation_dropout, gelu",
        pytest.param("bias_dropout_residual_layer_norm, prenorm", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("check", [check_layouts, check_single_gradients])
def test_contract(check: Any, name: str) -> None:
    case = CASES[name]
    check(compiled_form(name), case.reference, tensors(*case.shapes((2, 3, 129))), **case.options)


@compiled_once(torch.float32)
def test_it_saves_what_the_kernels_save(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs = [value.requires_grad_() for value in tensors(*case.shapes((2, 3, 129)), dtype=dtype)]
    vectors = [value for value in inputs if value.dim() == 1]
    kept = saved_bytes(partial(compiled_form(name), **case.options), *inputs, parameters=vectors)
    rows = 129 * 3 * 2 * 4  # the causal case is upright
    assert case.saved * inputs[0].nbytes <= kept <= case.saved * inputs[0].nbytes + rows + 8


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in IN_BFLOAT16 else ()) for name in FEW]
)
def test_second_derivatives(name: str) -> None:
    case = CASES[name]

    def second(form: Any) -> list[torch.Tensor]:
        inputs = [value.requires_grad_() for value in tensors(*case.shapes((2, 3, 129)))]
        outputs = form(*inputs, **case.options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = torch.stack([out.square().sum() for out in outputs]).sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return list(torch.autograd.grad(sum((one.square().sum() for one in first), start=first[0].sum()), inputs))

    for got, expected in zip(second(compiled_form(name)), second(case.reference), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float64))],
    ids=str,
)
@pytest.mark.parametrize("interleaved", [pytest.param(True, marks=pytest.mark.slow), False])
def test_rotary(interleaved: bool, dtype: torch.dtype) -> None:
    angles = torch.linspace(0, 6, 7 * 4).view(7, 4)
    table_dtype = torch.promote_types(dtype, torch.float32)
    tables = angles.cos().to(table_dtype), angles.sin().to(table_dtype)

    def form(op: Any) -> Any:
        def turned(q: torch.Tensor, k: torch.Tensor, **options: Any) -> Any:
            wide = torch.promote_types(q.dtype, torch.float32)
            return op(q.transpose(1, 2), k, *(table.to(wide) for table in tables), interleaved=interleaved, **options)

        return turned

    inputs = tensors((2, 7, 3, 12), (2, 1, 7, 12), dtype=dtype)
    assert_as_good_as(partial(form(ops.rotary), backend="inductor"), form(rotary_reference), inputs)
    q, k = ops.rotary(inputs[0].transpose(1, 2), inputs[1], *tables, interleaved=interleaved, backend="inductor")
    assert q.transpose(1, 2).is_contiguous()
    assert k.is_contiguous()


@pytest.mark.parametrize("by_token", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rotary_takes_a_gradient_of_another_layout(by_token: bool) -> None:
    angles = torch.linspace(0, 6, 7 * 4).view(7, 4)

    def gradients(backend: str) -> list[torch.Tensor]:
        x, dy = tensors((2, 7, 3, 8), (2, 3, 7, 8))
        x = (x if by_token else x.transpose(1, 2).contiguous().transpose(1, 2)).requires_grad_()
        dy = dy if by_token else dy.transpose(1, 2).contiguous().transpose(1, 2)
        heads = x.transpose(1, 2)
        y, _ = ops.rotary(heads, heads.detach(), angles.cos(), angles.sin(), interleaved=True, backend=backend)
        return [y, *torch.autograd.grad(y, [heads], dy)]

    for got, expected in zip(gradients("inductor"), gradients("eager"), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("reduction", ["mean", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sum", "none"))])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float64))],
    ids=str,
)
def test_cross_entropy(dtype: torch.dtype, reduction: str) -> None:
    target = torch.tensor([[3, -100, 0], [128, 7, 7]])
    options = {"target": target, "reduction": reduction, "label_smoothing": 0.2, "z_loss": 0.01}
    inputs = tensors((2, 3, 129), dtype=dtype)
    form = partial(ops.cross_entropy, backend="inductor")
    assert_as_good_as(form, cross_entropy_reference, inputs, **options)


def test_cross_entropy_of_infinite_logits_and_of_none() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [torch.inf, 0.0, 0.0], [torch.nan, 0.0, 0.0]])
    for target in (torch.tensor([0, 1, 2]), torch.tensor([1, 1, -100]), torch.full((3,), -100)):
        got, expected = (
            ops.cross_entropy(logits, target, reduction="none", backend=name) for name in ("inductor", "eager")
        )
        torch.testing.assert_close(got, expected, equal_nan=True)
    assert ops.cross_entropy(logits, target, backend="inductor").isnan()


def test_cross_entropy_of_a_target_out_of_range() -> None:
    logits = torch.zeros(2, 3)
    for target in (torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.tensor([-100, 3]), torch.tensor([-100, -1])):
        with pytest.raises(IndexError) as eager:
            ops.cross_entropy(logits, target, backend="eager")
        with pytest.raises(IndexError) as compiled_error:
            ops.cross_entropy(logits, target, backend="inductor")
        assert str(compiled_error.value) == str(eager.value)


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [1, 7])
def test_cross_entropy_with_any_ignore_index(ignored: int) -> None:
    target = torch.tensor([0, ignored, 2, ignored])
    logits = torch.randn(4, 3).requires_grad_()
    results = []
    for name in ("inductor", "eager"):
        loss = ops.cross_entropy(logits, target, ignore_index=ignored, backend=name)
        results.append((loss, *torch.autograd.grad(loss, logits)))
    torch.testing.assert_close(*results)


@pytest.mark.slow
def test_cross_entropy_of_equal_rows_is_exact() -> None:
    logits, target = torch.zeros(16384, 2), torch.zeros(16384, dtype=torch.int64)
    for reduction, rows in (("mean", 1), ("sum", 16384)):
        loss = ops.cross_entropy(logits, target, reduction=reduction, backend="inductor")
        assert loss.item() == pytest.approx(rows * math.log(2), rel=1e-6)


@pytest.mark.parametrize("shape", [(3, 0), (0, 0)])
def test_norms_of_no_columns(shape: tuple[int, int]) -> None:
    x, weight = torch.empty(shape).requires_grad_(), torch.ones(0).requires_grad_()
    for norm in (ops.layer_norm, ops.rms_norm):
        y = norm(x, weight=weight, backend="inductor")
        assert y.shape == shape
        assert [one.shape for one in torch.autograd.grad(y.sum(), [x, weight])] == [shape, (0,)]


def test_options_get_code_of_their_own() -> None:
    def power(x: torch.Tensor, exponent: float) -> torch.Tensor:
        return x**exponent

    of_power = compiled(power)
    x = torch.tensor([2.0, 3.0])
    assert of_power(x, 2).tolist() == [4.0, 9.0]
    assert of_power(x, 3).tolist() == [8.0, 27.0]


class Traced:
    """A formula that counts how often it runs in Python: once for each code, and then only where it is not compiled."""

    def __init__(self) -> None:
        self.shapes: list[list[Any]] = []

    def __call__(self, x: torch.Tensor, other: torch.Tensor | None, fixed: str) -> torch.Tensor:
        self.shapes.append(list(x.shape))
        return x.sin() if other is None else x.sin() + other


def test_a_size_that_changes_is_any_size_from_then_on() -> None:
    formula = Traced()
    of_sine = compiled(formula)
    for rows in (3, 4, 5, 60, 4, 3):
        x, row = tensors((rows, 17), (17,))
        torch.testing.assert_close(of_sine(x, row, "any"), x.sin() + row)
    assert formula.shapes[0] == [3, 17]
    assert [isinstance(size, int) for size in formula.shapes[1]] == [False, True]
    assert len(formula.shapes) == 2


def test_a_number_that_changes_at_each_call_is_not_compiled_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselayers.ops.implementations.compiled._MAX_NUMBERS", 2)
    traced = []

    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        traced.append(factor)
        return x * factor

    of_scaled = compiled(scaled)
    x = torch.randn(3, 17)
    for factor in (0.5, 0.25, 0.5):
        torch.testing.assert_close(of_scaled(x, factor), x * factor)
    assert traced == [0.5, 0.25]
    with pytest.warns(
        FallbackWarning, match=r"op by op for \[3, 17\]: it would be code for more than 2 values of \(0.125,"
    ):
        torch.testing.assert_close(of_scaled(x, 0.125), x * 0.125)
    torch.testing.assert_close(of_scaled(x[:2], 0.5), x[:2] * 0.5)


@pytest.mark.parametrize("name", ["dropout", pytest.param("bias_dropout_residual", marks=pytest.mark.slow)])
def test_a_backward_in_forward_mode_has_its_tangents(name: str) -> None:
    case = CASES[name]
    inputs = [one.requires_grad_() for one in tensors(*case.shapes((3, 17)))]
    y = compiled_form(name)(*inputs, **case.options)
    dy, tangent = torch.randn_like(y), torch.randn_like(y)
    (expected,) = torch.autograd.grad(compiled_form(name)(*inputs, **case.options), inputs[0], tangent)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(dy, tangent)
        dx, *_ = torch.autograd.grad(y, inputs[0], dual)
        found = torch.autograd.forward_ad.unpack_dual(dx).tangent
    torch.testing.assert_close(found, expected)


def test_rotary_takes_batched_gradients() -> None:
    q, k = tensors((2, 3, 4, 8), (2, 3, 4, 8))
    cos, sin = tensors((4, 4), (4, 4))
    q.requires_grad_()
    incoming = torch.randn(5, *q.shape)
    found, expected = (
        torch.autograd.grad(ops.rotary(q, k, cos, sin, backend=backend)[0], q, incoming, is_grads_batched=True)[0]
        for backend in ("inductor", "eager")
    )
    torch.testing.assert_close(found, expected)


def test_too_many_sizes_run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselayers.ops.implementations.compiled._MAX_CODES", 1)
    formula = Traced()
    of_sine = compiled(formula)
    of_sine(torch.randn(3, 17), None, "any")
    x = torch.randn(4, 17)
    with pytest.warns(FallbackWarning, match=r"op by op for \[4, 17\]: it would be code for more than 1 combinations"):
        torch.testing.assert_close(of_sine(x, None, "any"), x.sin())
    torch.testing.assert_close(of_sine(x, None, "any"), x.sin())
    assert formula.shapes == [[3, 17], [4, 17], [4, 17]]


def test_the_cache_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselayers.ops.implementations.compiled._MAX_CALLS", 2)
    formula = Traced()
    of_sine = _Compiled(formula)
    for rows in (2, 3, 4, 5, 2, 3):
        x = torch.randn(rows, 17)
        torch.testing.assert_close(of_sine.call(x, None, "any"), x.sin())
        assert len(of_sine._calls) <= 2
    assert len(formula.shapes) == 2


def test_layouts_share_code() -> None:
    formula = Traced()
    of_sine = compiled(formula)
    x = torch.randn(6, 6)
    minus = torch._neg_view(x)  # contiguous, and its memory has the other sign
    assert minus.is_neg()
    for view in (x, x.mT, x[:1].expand(6, 6), torch.randn(12, 12)[::2, ::2], minus):
        torch.testing.assert_close(of_sine(view, None, "any"), view.sin())
    assert len(formula.shapes) == 1


def test_threads_share_code() -> None:
    formula = Traced()
    of_sine = compiled(formula)
    inputs = [torch.randn(rows, 17) for rows in range(2, 18)]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda x: of_sine(x, None, "any"), inputs))
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, x.sin())
    assert len(formula.shapes) == 2


def test_in_inference_mode_and_under_dispatch_modes() -> None:
    x = torch.randn(4, 8)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(Traced())(x, None, "any"), x.sin())
    form = partial(ops.gated_activation, backend="inductor", activation=None)
    with FlopCounterMode(display=False):
        got = form(x, x + 1)
    torch.testing.assert_close(got, x * (x + 1))


def test_formulas_that_cannot_be_compiled() -> None:
    def looks(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    with pytest.warns(FallbackWarning, match=r"looks runs op by op for \[3\]: GuardOnDataDependentSymNode: "):
        assert torch.equal(compiled(looks)(-torch.ones(3)), torch.ones(3))
    for aliased in (lambda x: (x + 1, x), lambda x: x[1:], lambda x: (x + 1).split(2), lambda x: (x + 1,) * 2):
        with pytest.warns(FallbackWarning, match=r"op by op for \[4\]: ValueError: a result shares memory with "):
            compiled(aliased)(torch.ones(4))


def test_a_failed_compilation_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    formula = Traced()
    of_sine = compiled(formula)
    x = torch.randn(3, 17)
    of_sine(x, None, "any")

    def full(*_: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr("fuselayers.ops.implementations.compiled.compile_call", full)
    text = r"Traced runs op by op for \[4, 17\]: OSError: no space left on device$"
    with pytest.warns(FallbackWarning, match=text):
        torch.testing.assert_close(of_sine(x[:1].expand(4, 17), None, "any"), x[:1].expand(4, 17).sin())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(of_sine(x[:2], None, "any"), x[:2].sin())
        torch.testing.assert_close(of_sine(x, None, "any"), x.sin())


def test_nothing_is_compiled_for_no_elements() -> None:
    formula = Traced()
    of_sine = compiled(formula)
    for _ in range(2):
        assert of_sine(torch.ones(0, 17), None, "any").shape == (0, 17)
    assert formula.shapes == [[0, 17]] * 2


def test_threads_are_part_of_the_code() -> None:
    formula = Traced()
    of_sine = compiled(formula)
    x = torch.randn(3, 17)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 1):
            torch.set_num_threads(number)
            of_sine(x, None, "any")
    finally:
        torch.set_num_threads(threads)
    assert len(formula.shapes) == 2


def sum_of(number: int) -> Any:
    return lambda x: sum((x.sin() + place for place in range(number)), start=x)


def test_other_formulas_and_compilers_in_other_threads() -> None:
    x = torch.randn(20, 30)
    calls = [*(compiled(sum_of(number)) for number in (3, 4)), torch.compile(sum_of(5))]
    together = threading.Barrier(len(calls), timeout=60)

    def first(call: Any) -> torch.Tensor:
        together.wait()
        result: torch.Tensor = call(x)
        return result

    with ThreadPoolExecutor(len(calls)) as threads:
        for number, result in zip((3, 4, 5), threads.map(first, calls), strict=True):
            torch.testing.assert_close(result, sum_of(number)(x))


def test_autocast_does_not_reach_it() -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(square)(torch.eye(2)).dtype == torch.float32


def test_errors_of_the_compiled_implementation() -> None:
    assert why_not_compiled(torch.device("cpu")) is None
    reason = "the ops' compiled implementation is for a CPU, got cuda; fuse(op, backend='inductor') compiles there"
    assert why_not_compiled(torch.device("cuda")) == reason
    form = partial(ops.gated_activation, backend="inductor")
    with pytest.raises(
        BackendUnavailableError,
        match=r"^backend 'inductor' cannot run here: the ops' compiled implementation is for a CPU",
    ):
        form(torch.ones(2, 8, device="meta"))
    with pytest.raises(RuntimeError, match=r"^backend 'inductor' cannot take this call: inside a transform"):
        torch.vmap(form)(torch.ones(3, 2, 8))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"take this call: inside a transf"):
        form(torch.autograd.forward_ad.make_dual(torch.ones(2, 8), torch.ones(2, 8)))


def test_dynamo_does_not_trace_it() -> None:
    x, weight = tensors((4, 24), (24,))
    form = partial(ops.rms_norm, eps=0.5, backend="inductor")
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    with torch.compiler.set_stance("fail_on_recompile"):
        for x_learns, weight_learns in ((False, False), (True, False), (False, True), (True, True)):
            form(x.clone().requires_grad_(x_learns), weight=weight.clone().requires_grad_(weight_learns))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            form(x, weight=weight)
    assert counters["unique_graphs"] == before


@pytest.mark.parametrize("shape", [(30, 30), (300, 300)])
def test_a_backward_inside_of_a_compiled_step(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, requires_grad=True)

    def step() -> None:
        ops.dropout(x, 0.5, seed=torch.tensor(3)).sum().backward()

    step()
    expected, x.grad = x.grad, None
    torch.compile(step, backend="eager")()
    assert expected is not None
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fuselayers.ops.implementations.compiled.why_inductor_is_unavailable", lambda device: "no g++ here"
    )
    with pytest.raises(BackendUnavailableError, match=r"cannot run here: no g\+\+ here; or leave it to backend='auto'"):
        ops.dropout(torch.ones(2, 8), 0.5, backend="inductor")
    y = ops.dropout(torch.ones(2, 8), 0.5, seed=torch.tensor(7))
    assert y.count_nonzero() == 10
