import math
import random
import statistics
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from fuselayers.cli.tune import turns
from fuselayers.cli.tune.turns import Ratio, in_turns
from fuselayers.partition.timings import has_choice

CPU = torch.device("cpu")


class Clock:
    """A clock that only its steps move.

    Attributes:
        calls: which of the two was called, and whether it had a choice then.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, bool]] = []
        monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def ratio(self, eager: Callable[[], float], auto: Callable[[], float]) -> Ratio:
        """What is read where the two take the seconds that are given."""

        def step(name: str, seconds: Callable[[], float]) -> None:
            self.calls.append((name, has_choice()))
            self.now += seconds()

        return in_turns(lambda: step("eager", eager), lambda: step("auto", auto), CPU)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def spread(seconds: float, share: float, seed: int) -> Callable[[], float]:
    """Times around `seconds`, with a deviation of about that share of them, and more of the long ones."""
    draws = random.Random(seed)
    return lambda: seconds * draws.lognormvariate(0.0, share)


def width(ratio: Ratio) -> float:
    """Of the interval, as a share of the longer time."""
    return (ratio.high - ratio.low) / ratio.median / max(1.0, ratio.median)


def test_both_are_called_in_turns(clock: Clock) -> None:
    ratio = clock.ratio(lambda: 0.25, lambda: 0.0625)
    assert ratio == Ratio(4.0, 4.0, 4.0)
    both = list(zip(clock.calls[::2], clock.calls[1::2], strict=True))
    # Eager's own ops stay formulas.
    assert {frozenset(turn) for turn in both} == {frozenset({("eager", False), ("auto", True)})}
    assert len({turn[0] for turn in both}) == 2


def test_the_first_turn_does_not_count(clock: Clock) -> None:
    eager, auto = iter([5.0, *[0.25] * 31]), iter([0.125, *[0.125] * 31])
    assert clock.ratio(lambda: next(eager), lambda: next(auto)) == Ratio(2.0, 2.0, 2.0)


@pytest.mark.parametrize(("seconds", "turns"), [(2.0**-10, 1536), (2.0**-6, 96), (0.5, 31), (2.0, 15), (9.0, 11)])
def test_long_steps_are_timed_less_often(clock: Clock, seconds: float, turns: int) -> None:
    clock.ratio(lambda: seconds, lambda: seconds)
    assert len(clock.calls) == 2 * (1 + turns)


@pytest.mark.parametrize("share", [0.5, 1.0, 4.0])
def test_what_is_spread_is_timed_until_it_is_certain(clock: Clock, share: float) -> None:
    """Of the longer time: who gains a lot does not ask how much of the rest is lost."""
    deviation = 0.04 * max(1.0, share)
    ratio = clock.ratio(spread(0.01, deviation, seed=0), spread(0.01 / share, deviation, seed=1))
    assert 6 < clock.now < 60
    assert 0.005 < width(ratio) < 0.015


def test_nobody_waits_for_more_than_a_minute(clock: Clock) -> None:
    ratio = clock.ratio(spread(0.0625, 0.2, seed=0), spread(0.0625, 0.2, seed=1))
    assert 60 < clock.now < 61
    assert width(ratio) > 0.02


def test_steps_that_take_the_same_are_read_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On average, and as often as the intervals say, though how long they are read hangs on what is read."""
    ratios, turns = [], []
    for seed in range(200):
        clock = Clock(monkeypatch)
        ratios.append(clock.ratio(spread(0.06, 0.02, seed), spread(0.06, 0.02, 200 + seed)))
        turns.append(len(clock.calls) // 2)
    assert min(turns) < 200 < max(turns)
    errors = [math.log(ratio.median) for ratio in ratios]
    assert abs(statistics.mean(errors)) < 2 * statistics.stdev(errors) / math.sqrt(len(errors))
    # 95 % are 190; three deviations of that are 9.
    assert sum(ratio.low <= 1 <= ratio.high for ratio in ratios) > 190 - 9
