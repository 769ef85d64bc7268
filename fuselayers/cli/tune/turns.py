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

# How wide the 95 % interval of the ratio shall be; where the choice is faster, that of the inverse, its time as a share
# of eager's: a gain of 4 x need not be known to a percent.
_NARROW: Final = 0.01
# The interval of 31 turns of 60 ms was five or ten percent wide, that of 2001 of 0.7 ms half a percent (Xeon, 2 cores).
_PILOT_TURNS: Final = 31
_PILOT_SECONDS: Final = 3.0
_MOST_SECONDS: Final = 60.0
# Of steps of many seconds.
_FEWEST_TURNS: Final = 11

Step = Callable[[], None]


@dataclass(frozen=True)
class Ratio:
    """How often one time contains another.

    Attributes:
        median: of what was measured, a number for each turn.
        low: where the true median's interval of about 95 % begins, if turns do not hang on each other.
        high: where it ends.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} x ({self.low:.3f} to {self.high:.3f})"


def in_turns(eager: Step, auto: Step, device: torch.device) -> Ratio:
    """How often eager's time contains the other's, both called in turns and in random order: what else the machine does
    for a while falls on both of a turn alike. It is wall time as a caller sees it, launches included.

    One turn is discarded. A pilot of at least 31 turns and 3 seconds (or of 11 turns and a minute) says by the width of
    its interval how many turns are needed in all; so many there are, or a minute of them. The width is not looked at
    again: to stop as soon as it looks narrow makes an interval of 95 % one of 93 (simulated).
    """
    order = random.Random(0)
    # Eager's ops shall not change their form; what is fused has made its choice.
    both = [("eager", eager, math.inf), ("auto", auto, 0.0)]

    def turn() -> float:
        seconds = {}
        for name, step, wait in order.sample(both, 2):
            with patience(wait):
                synchronize(device)
                started = time.perf_counter()
                step()
                synchronize(device)
                seconds[name] = time.perf_counter() - started
        return seconds["eager"] / seconds["auto"]

    turn()  # what only comes first shall not use up the minute
    began = time.perf_counter()
    ratios: list[float] = []
    while not _is_pilot_over(len(ratios), time.perf_counter() - began):
        ratios.append(turn())
    pilot = _ratio(ratios)
    width = (pilot.high - pilot.low) / pilot.median / max(1.0, pilot.median)
    needed = len(ratios) * (width / _NARROW) ** 2
    while len(ratios) < needed and time.perf_counter() - began < _MOST_SECONDS:
        ratios.append(turn())
    return _ratio(ratios)


def _is_pilot_over(turns: int, seconds: float) -> bool:
    if seconds >= _MOST_SECONDS:
        return turns >= _FEWEST_TURNS
    return turns >= _PILOT_TURNS and seconds >= _PILOT_SECONDS


def _ratio(measured: Sequence[float]) -> Ratio:
    """The median with its interval, for 6 or more values that are spread in any way: how many of n lie below the true
    median is binomial, n / 2 with a deviation of sqrt(n) / 2.

    >>> _ratio([0.5, 0.75, 0.75, 1.0, 1.0, 1.0, 1.0, 1.25, 1.25, 1.75, 9.0])
    Ratio(median=1.0, low=0.75, high=1.75)
    """
    in_order = sorted(measured)
    outside = math.floor((len(in_order) - 1.96 * math.sqrt(len(in_order)) - 1) / 2)
    return Ratio(statistics.median(in_order), in_order[outside], in_order[-1 - outside])
