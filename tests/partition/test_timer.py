import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuselayers._torch.dispatch import TorchDispatchMode
from fuselayers.partition import timer
from fuselayers.partition.timer import Step, median_seconds, time_in_turns

CPU = torch.device("cpu")


class Clock:
    """A clock that only its steps move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def step(self, name: str, seconds: Iterator[float]) -> Step:
        def run(prepared: Any) -> None:
            assert prepared == f"for {name}"
            self.calls.append(name)
            self.now += next(seconds)

        def prepare() -> str:
            self.now += 0.25  # does not count
            return f"for {name}"

        return Step(run, prepare)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_steps_take_turns_in_shuffled_order_after_a_warm_up(clock: Clock) -> None:
    slow = itertools.chain([64.0, 64.0], itertools.cycle([1.0, 1.0, 8.0]))
    steps = {"slow": clock.step("slow", slow), "quick": clock.step("quick", itertools.repeat(0.5))}
    times = time_in_turns(steps, device=CPU, rounds=9, warm_up=2)
    assert times == {"slow": [1.0, 1.0, 8.0] * 3, "quick": [0.5] * 9}
    assert median_seconds(times) == {"slow": 1.0, "quick": 0.5}
    rounds = set(zip(clock.calls[::2], clock.calls[1::2], strict=True))
    assert rounds == {("slow", "quick"), ("quick", "slow")}


@pytest.mark.parametrize(("seconds", "rounds"), [(0.75, 100), (15.75, 7), (1000.0, 3)])
def test_long_steps_run_less_often(clock: Clock, seconds: float, rounds: int) -> None:
    """A round takes a quarter of a second more, for what comes before the step."""
    steps = {"one": clock.step("one", itertools.repeat(seconds))}
    assert len(time_in_turns(steps, device=CPU, rounds=100, seconds=99.5)["one"]) == rounds


def test_random_numbers_stay(clock: Clock) -> None:
    import random

    before = random.getstate()
    time_in_turns({"one": clock.step("one", itertools.repeat(1.0))}, device=CPU, rounds=3)
    assert random.getstate() == before


def test_the_real_clock() -> None:
    import time

    steps = {"sleep": Step(lambda _: time.sleep(0.01)), "nothing": Step(lambda _: None)}
    seconds = median_seconds(time_in_turns(steps, device=CPU, rounds=3, cold=True))
    assert seconds["sleep"] > 0.009 > seconds["nothing"]


class Events:
    """Stands in for `torch.cuda`, and for the GPU: collects the ops between the events, and times them by hand."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return SimpleNamespace(record=lambda stream: self.log.append("event"), elapsed_time=lambda end: 0.2)

    def synchronize(self, device: torch.device) -> None:
        self.log.append("wait")

    def current_stream(self, device: torch.device) -> None: ...


class Ops(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)
        size = args[0].nbytes if args and isinstance(args[0], torch.Tensor) else 0
        self.log.append(f"{'writes' if writes else 'reads'} {size >> 20} MB" if size else "allocates")
        return func(*args, **kwargs or {})


def test_on_a_gpu_the_caches_are_flooded_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that a flood leaves dirty are written back while the step runs, and a step that reads pays for them."""
    events = Events()
    for name in ("Event", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(events, name))
    clock = timer._EventClock(torch.device("meta"))
    with Ops(events.log):
        events.log.clear()
        clock.start()
        events.log.append("the step")
        assert clock.stop() == pytest.approx(0.2e-3)
    # Three floods of 0.2 ms, for half a millisecond of launches.
    assert events.log == ["wait", *["reads 256 MB"] * 3, "event", "the step", "event", "wait"]
