import json
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fuselayers import ops
from fuselayers.ops.forms import choice
from fuselayers.ops.forms.dispatch import run
from fuselayers.ops.forms.served import forget_served
from fuselayers.partition import BackendUnavailableError, timings, warm_up

WORTH_IT = (256, 256)


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    choice.forget_forms()
    with warm_up(0):
        yield
    choice.forget_forms()


class Form:
    """A way to double x, that takes `seconds` and counts its calls."""

    def __init__(self, seconds: float, *, fails: bool = False) -> None:
        self.seconds, self.fails, self.calls = seconds, fails, 0

    def __call__(self, x: Tensor, name: str) -> Tensor:
        self.calls += 1
        if self.fails:
            raise BackendUnavailableError("no compiler")
        time.sleep(self.seconds)
        return x * 2


def call(formula: Form, fused: Form, x: Tensor | None = None) -> Form:
    """Call, and return the form that served last."""
    before = formula.calls, fused.calls
    choice.call_faster(formula, fused, (torch.ones(WORTH_IT) if x is None else x,), ("double",))
    grown = formula.calls - before[0], fused.calls - before[1]
    assert grown in ((1, 0), (0, 1))
    return formula if grown[0] else fused


def settle(formula: Form, fused: Form) -> Form:
    choice.call_faster(formula, fused, (torch.ones(WORTH_IT),), ("double",))
    return call(formula, fused)


def test_the_faster_form_serves() -> None:
    slow, fast = Form(0.02), Form(0.001)
    assert settle(slow, fast) is fast
    choice.forget_forms()
    timings.auto_file().unlink()
    assert settle(fast, slow) is fast


def test_both_times_are_kept_and_read_again() -> None:
    slow, fast = Form(0.02), Form(0.001)
    settle(slow, fast)
    (machine,) = json.loads(timings.auto_file().read_text()).values()
    ((key, seconds),) = machine.items()
    assert "float32 256+x256, double" in key
    assert seconds["eager"] > seconds["inductor"] > 0
    choice.forget_forms()  # as in a later process
    assert call(slow, fast) is fast  # without a new measurement: one call


def test_another_layout_and_other_threads_are_other_questions() -> None:
    slow, fast = Form(0.02), Form(0.001)
    settle(slow, fast)
    choice.call_faster(slow, fast, (torch.ones(WORTH_IT).mT,), ("double",))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        choice.call_faster(slow, fast, (torch.ones(WORTH_IT),), ("double",))
    finally:
        torch.set_num_threads(threads)
    known = json.loads(timings.auto_file().read_text())
    assert [len(times) for times in known.values()] == [2, 1]


def test_a_forward_alone_is_another_question_than_training() -> None:
    slow, fast = Form(0.02), Form(0.001)
    settle(slow, fast)
    x = torch.ones(WORTH_IT, requires_grad=True)
    choice.call_faster(slow, fast, (x,), ("double",))
    (machine,) = json.loads(timings.auto_file().read_text()).values()
    assert [key.count("grad") for key in machine] == [0, 1]
    assert x.grad is None


def test_nothing_is_measured_before_its_time() -> None:
    slow, fast = Form(0.02), Form(0.001)
    with warm_up(1000):
        assert [call(slow, fast) for _ in range(3)] == [slow] * 3
    (spent,) = choice._spent.values()
    with warm_up(spent):
        choice.call_faster(slow, fast, (torch.ones(WORTH_IT),), ("double",))
        assert call(slow, fast) is fast


def test_what_is_forgotten_begins_anew() -> None:
    slow, fast = Form(0.02), Form(0.001)
    with warm_up(0.05):
        for _ in range(5):
            assert call(slow, fast) is slow
            choice.forget_forms()
    assert fast.calls == 0


@pytest.mark.parametrize("why", ["small", "deterministic", "checkpoint", "dispatch mode", "never"])
def test_the_formula_serves_where_a_change_would_hurt(why: str) -> None:
    slow, fast = Form(0.02), Form(0.001)
    if why != "small":
        assert settle(slow, fast) is fast
    if why == "small":
        assert call(slow, fast, torch.ones(8, 8)) is slow
    elif why == "deterministic":
        torch.use_deterministic_algorithms(True)
        try:
            assert call(slow, fast) is slow
        finally:
            torch.use_deterministic_algorithms(False)
    elif why == "checkpoint":
        served = []
        x = torch.ones(WORTH_IT, requires_grad=True)
        y = checkpoint(lambda x: (served.append(call(slow, fast)), x.sin())[1], x, use_reentrant=False)
        y.sum().backward()
        assert served == [slow, slow]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            assert call(slow, fast) is slow
    elif why == "dispatch mode":
        with FlopCounterMode(display=False):
            assert call(slow, fast) is slow
    else:
        with warm_up(math.inf):
            assert call(slow, fast) is slow


def test_one_layouts_answer_is_not_anothers() -> None:
    served = []

    def form(name: str, slow: bool) -> Any:
        def of(x: Tensor) -> Tensor:
            served.append(name)
            if x.is_contiguous() == slow:
                time.sleep(0.02)
            return x * 2

        return of

    formula, fused = form("formula", True), form("fused", False)
    x = torch.ones(WORTH_IT)
    for given, best in ((x, "fused"), (x.mT, "formula"), (x, "fused"), (x.mT, "formula")):
        for _ in range(2):
            run("auto", formula, fused, (given,))
        assert served[-1] == best


def test_a_form_that_can_no_longer_be_compiled() -> None:
    slow, fast = Form(0.02), Form(0.001)
    assert settle(slow, fast) is fast
    choice.forget_forms()  # as in a later process
    fast.fails = True
    for _ in range(2):
        choice.call_faster(slow, fast, (torch.ones(WORTH_IT),), ("double",))
    calls = fast.calls
    choice.call_faster(slow, fast, (torch.ones(WORTH_IT),), ("double",))
    assert fast.calls == calls


def test_a_form_that_cannot_be_compiled() -> None:
    formula, broken = Form(0.001), Form(0.0, fails=True)
    assert settle(formula, broken) is formula
    assert broken.calls == 1
    assert not timings.auto_file().exists()


def test_a_measurement_that_fails_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(choice, "seconds_of", fails)
    formula = Form(0.0)
    assert settle(formula, Form(0.0)) is formula
    assert not timings.auto_file().exists()


@pytest.mark.parametrize("text", ["", '{"machine": {"key": {"eager": "fast"}}}', "[]", '{"another": 3}'])
def test_a_file_that_cannot_be_used_is_said_and_stops_nothing(text: str) -> None:
    timings.auto_file().write_text(text)
    slow, fast = Form(0.02), Form(0.001)
    with pytest.warns(UserWarning, match=rf"^{timings.auto_file()} does not hold times as fuselayers writes them \("):
        choice.call_faster(slow, fast, (torch.ones(WORTH_IT),), ("double",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(slow, fast) is fast


def test_a_home_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FUSELAYERS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    slow, fast = Form(0.02), Form(0.001)
    assert settle(slow, fast) is fast


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path / "file" / "below"))
    slow, fast = Form(0.02), Form(0.001)
    assert settle(slow, fast) is fast


def test_patience_is_checked() -> None:
    for seconds in (-1.0, math.nan):
        with (
            pytest.raises(ValueError, match=rf"^warm_up must be a number of seconds from 0 on, got {seconds}$"),
            warm_up(seconds),
        ):
            raise AssertionError


@pytest.mark.skipif(choice.why_not_compiled(torch.device("cpu")) is not None, reason="nothing can be compiled here")
def test_an_op_changes_its_form_and_keeps_its_numbers() -> None:
    def step() -> list[Any]:
        x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = ops.bias_activation_dropout(x, activation="gelu", p=0.3, seed=torch.tensor(5))
        return [y.detach(), *torch.autograd.grad(y.square().sum(), x), y.grad_fn]

    with warm_up(math.inf):
        *formula, _ = step()
    *measured, _ = step()
    (machine,) = json.loads(timings.auto_file().read_text()).values()
    ((key, seconds),) = machine.items()
    assert key == "bias_activation_dropout, float32 64+x1024 grad, None, None, 0, gelu, 0.3"
    assert set(seconds) == {"eager", "inductor"}
    (decided,) = choice._decided
    for compiled in (True, False):
        choice._decided[decided] = compiled
        forget_served()
        *again, node = step()
        assert ("_BiasActivationDropoutBackward" in str(node)) is compiled
        for got, expected in zip(again, formula, strict=True):
            torch.testing.assert_close(got, expected)
    for got, expected in zip(measured, formula, strict=True):
        torch.testing.assert_close(got, expected)
