"""How much faster one step is than another: both in turns, and as many of them as the answer needs."""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ...partition import patience
from ..machine import synchronize

__all__ = ["Ratio", "Step", "in_turns"]

# How wide the 95 % interval shall be, end to end, as a share of the longer of both times.
_NARROW: Final = 0.01
# A few turns that happen to be alike, or one moment of the machine, would say little of how many are needed.
_FIRST_SECONDS: Final = 3.0
_FIRST_TURNS: Final = 31
# For steps of many seconds, or a machine that does other things too.
_MOST_SECONDS: Final = 60.0
_TURNS_OF_SLOW_STEPS: Final = 11

Step = Callable[[], None]


@dataclass(frozen=True)
class Ratio:
    """How often one time contains another.

    Attributes:
        median: of what was measured, a number for each turn.
        low: where the true median's interval of at least 95 % begins, if turns do not hang on each other.
        high: where it ends.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} x ({self.low:.3f} to {self.high:.3f})"


def in_turns(eager: Step, auto: Step, device: torch.device) -> Ratio:
    """How often eager's time contains the other's, both called in turns and in random order: what else the machine does
    for a while falls on both of a turn alike. The time is a caller's, with what it takes to launch something.

    The first turns, 31 or more of three seconds, say how many are needed for an interval of one percent of the longer
    time, and so many there are, unless a minute ends them. Nobody looks again before that: who stops where a reading is
    good, or its interval narrow, gets too good ones, or too narrow.
    """
    order = random.Random(0)

    def turn() -> float:
        seconds = {}
        for name in order.sample(["eager", "auto"], 2):
            # Eager's ops shall not change their form; what is fused has made its choice.
            with patience(math.inf if name == "eager" else 0):
                synchronize(device)
                started = time.perf_counter()
                (eager if name == "eager" else auto)()
                synchronize(device)
                seconds[name] = time.perf_counter() - started
        return seconds["eager"] / seconds["auto"]

    turn()  # neither shall pay for what comes first
    began = time.perf_counter()
    ratios: list[float] = []
    while not _are_first_turns(len(ratios), time.perf_counter() - began):
        ratios.append(turn())
    first = _ratio(ratios)
    width = (first.high - first.low) / first.median / max(1.0, first.median)
    needed = len(ratios) * (width / _NARROW) ** 2
    while len(ratios) < needed and time.perf_counter() - began < _MOST_SECONDS:
        ratios.append(turn())
    return _ratio(ratios)


def _are_first_turns(turns: int, seconds: float) -> bool:
    if seconds >= _MOST_SECONDS:
        return turns >= _TURNS_OF_SLOW_STEPS
    return turns >= _FIRST_TURNS and seconds >= _FIRST_SECONDS


def _ratio(measured: Sequence[float]) -> Ratio:
    """The median with its interval, for 6 or more values that are spread in any way: how many of n lie below the true
    median is binomial, n / 2 with a deviation of sqrt(n) / 2.

    >>> _ratio([0.5, 0.75, 0.75, 1.0, 1.0, 1.0, 1.0, 1.25, 1.25, 1.75, 9.0])
    Ratio(median=1.0, low=0.75, high=1.75)
    """
    in_order = sorted(measured)
    outside = math.floor((len(in_order) - 1.96 * math.sqrt(len(in_order)) - 1) / 2)
    return Ratio(statistics.median(in_order), in_order[outside], in_order[-1 - outside])
