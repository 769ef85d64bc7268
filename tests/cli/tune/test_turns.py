import random
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
    """Times around `seconds`, with a deviation of that share of them."""
    draws = random.Random(seed)
    return lambda: seconds * draws.gauss(1.0, share)


def test_both_are_called_in_turns(clock: Clock) -> None:
    ratio = clock.ratio(lambda: 0.25, lambda: 0.0625)
    assert ratio == Ratio(4.0, 4.0, 4.0)
    both = list(zip(clock.calls[::2], clock.calls[1::2], strict=True))
    assert len(both) == 31
    # Eager's own ops stay formulas.
    assert {frozenset(turn) for turn in both} == {frozenset({("eager", False), ("auto", True)})}
    assert len({turn[0] for turn in both}) == 2


@pytest.mark.parametrize(
    ("seconds", "number"), [(2.0**-13, 2001), (2.0**-6, 96), (0.5, 31), (2.0, 16), (2.75, 11), (9.0, 11)]
)
def test_long_steps_are_timed_less_often(clock: Clock, seconds: float, number: int) -> None:
    clock.ratio(lambda: seconds, lambda: seconds)
    assert len(clock.calls) == 2 * number


@pytest.mark.parametrize(("share", "deviation", "expected"), [(0.5, 0.04, 0.01), (1.0, 0.04, 0.01), (4.0, 0.16, 0.04)])
def test_what_is_spread_is_timed_until_it_is_certain(
    clock: Clock, share: float, deviation: float, expected: float
) -> None:
    """To one percent of the longer time: who gains a lot does not ask how much of the rest is lost."""
    ratio = clock.ratio(spread(0.02, deviation, seed=0), spread(0.02 / share, deviation, seed=1))
    assert 4 < clock.now < 60
    assert 0.75 * expected < (ratio.high - ratio.low) / ratio.median <= expected
    assert ratio.low < share < ratio.high


def test_nobody_waits_for_more_than_a_minute(clock: Clock) -> None:
    ratio = clock.ratio(spread(0.0625, 0.2, seed=0), spread(0.0625, 0.2, seed=1))
    assert 60 < clock.now < 60.5
    assert (ratio.high - ratio.low) / ratio.median > 0.02


def test_when_it_ends_does_not_hang_on_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    for share in (0.95, 0.98, 1.0):
        clock = Clock(monkeypatch)
        clock.ratio(spread(0.02 * share, 0.04, seed=0), spread(0.02, 0.04, seed=1))
        numbers.append(len(clock.calls))
    assert max(numbers) < 1.05 * min(numbers)


def test_the_interval_holds_the_truth_though_it_ends_when_that_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = [Clock(monkeypatch).ratio(spread(0.02, 0.03, seed), spread(0.02, 0.03, 100 + seed)) for seed in range(100)]
    assert sum(one.low <= 1 <= one.high for one in ratios) >= 90
    assert sum(one.median > 1 for one in ratios) == pytest.approx(50, abs=15)
