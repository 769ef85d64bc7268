import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
