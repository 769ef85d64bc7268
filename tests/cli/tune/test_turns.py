import itertools
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


def test_both_are_called_in_turns(clock: Clock) -> None:
    ratio = clock.ratio(lambda: 0.25, lambda: 0.0625)
    assert ratio == Ratio(4.0, 4.0, 4.0)
    both = list(zip(clock.calls[::2], clock.calls[1::2], strict=True))
    # Eager's own ops stay formulas.
    assert {frozenset(turn) for turn in both} == {frozenset({("eager", False), ("auto", True)})}
    assert len({turn[0] for turn in both}) == 2


def test_a_long_first_turn_does_not_use_up_the_minute(clock: Clock) -> None:
    eager = itertools.chain([70.0], itertools.repeat(0.25))
    assert clock.ratio(lambda: next(eager), lambda: 0.125) == Ratio(2.0, 2.0, 2.0)
    assert len(clock.calls) == 2 * (1 + 31)


@pytest.mark.parametrize(("seconds", "turns"), [(2.0**-10, 1536), (2.0**-6, 96), (0.5, 31), (2.0, 15), (9.0, 11)])
def test_long_steps_are_timed_less_often(clock: Clock, seconds: float, turns: int) -> None:
    clock.ratio(lambda: seconds, lambda: seconds)
    assert len(clock.calls) == 2 * (1 + turns)


@pytest.mark.parametrize("later", [1.0, 1.25])
@pytest.mark.parametrize(("ratio", "turns"), [(0.75, 303), (1.0, 303), (1.25, 194)])
def test_the_pilot_says_how_many_turns_there_are(clock: Clock, ratio: float, turns: int, later: float) -> None:
    """And not what comes after it. Its interval is 1 / 32 of the ratio wide: 31 * 3.125 ** 2 are 302.7. Of a choice
    that is faster, what counts is a share of eager's time: 31 * 2.5 ** 2 are 193.75."""
    pilot = [0.0625, *[0.0625, 0.0625 * 33 / 32] * 15, 0.0625]
    eager = itertools.chain(pilot, itertools.cycle([0.0625, 0.0625 * later]))
    clock.ratio(lambda: next(eager), lambda: 0.0625 / ratio)
    assert clock.now < 60
    assert len(clock.calls) == 2 * (1 + turns)


def test_nobody_waits_for_more_than_a_minute(clock: Clock) -> None:
    clock.ratio(spread(0.0625, 0.2, seed=0), spread(0.0625, 0.2, seed=1))
    assert 60 < clock.now < 61


def test_steps_that_take_the_same_are_read_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On average, and as often as the intervals say, though how long they are read hangs on what is read."""
    ratios = []
    for seed in range(400):
        clock = Clock(monkeypatch)
        ratios.append(clock.ratio(spread(0.06, 0.02, seed), spread(0.06, 0.02, 400 + seed)))
        assert 31 < len(clock.calls) // 2 < 510  # 200 or so
    errors = [math.log(ratio.median) for ratio in ratios]
    assert abs(statistics.mean(errors)) < 3 * statistics.stdev(errors) / math.sqrt(len(errors))
    assert statistics.median((ratio.high - ratio.low) / ratio.median for ratio in ratios) == pytest.approx(
        0.01, rel=0.1
    )
    # 95 % are 380; three deviations of that are 13.
    assert sum(ratio.low <= 1 <= ratio.high for ratio in ratios) > 380 - 13
