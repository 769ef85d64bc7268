"""How much faster one step is than another: both in turns, for as long as that takes to be certain."""

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

# How many turns there are hangs on how far they are spread, not on what they show: who stops at a good reading, and
# goes on at a bad one, reads too much.
_NARROW: Final = 0.01
# A few turns that happen to be alike, or one moment of the machine, say little.
_LEAST_SECONDS: Final = 3.0
_LEAST_TURNS: Final = 31
# 401 left the ratio of a kernel of 0.4 ms uncertain by a percent (EPYC, 2 cores).
_MOST_TURNS: Final = 2001
# For steps of many seconds, or a machine that does other things too.
_MOST_SECONDS: Final = 60.0
_FEWEST_TURNS: Final = 11

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
    for a while falls on both of a turn alike.

    They go on for three seconds and 31 turns, and then until the interval is narrow: one percent of the longer of both
    times. But for no more than 2001 turns, or a minute and 11 turns.
    """
    ratios: list[float] = []
    order = random.Random(0)
    began = time.perf_counter()
    while not _is_enough(ratios, time.perf_counter() - began):
        took = {}
        for step in order.sample([eager, auto], 2):
            # Eager's ops shall not change their form; what is fused has made its choice.
            with patience(math.inf if step is eager else 0):
                synchronize(device)
                started = time.perf_counter()
                step()
                synchronize(device)
                took[step] = time.perf_counter() - started
        ratios.append(took[eager] / took[auto])
    return _ratio(ratios)


def _is_enough(ratios: Sequence[float], seconds: float) -> bool:
    turns = len(ratios)
    if turns < _FEWEST_TURNS:
        return False
    if seconds > _MOST_SECONDS or turns >= _MOST_TURNS:
        return True
    if seconds < _LEAST_SECONDS or turns < _LEAST_TURNS:
        return False
    ratio = _ratio(ratios)
    # What a time is uncertain by, by itself, and as a share of eager's.
    uncertain = (ratio.high - ratio.low) / ratio.median
    return min(uncertain, uncertain / ratio.median) <= _NARROW


def _ratio(measured: Sequence[float]) -> Ratio:
    """The median with its interval, for 6 or more values that are spread in any way: how many of n lie below the true
    median is binomial, n / 2 with a deviation of sqrt(n) / 2.

    >>> _ratio([0.5, 0.75, 0.75, 1.0, 1.0, 1.0, 1.0, 1.25, 1.25, 1.75, 9.0])
    Ratio(median=1.0, low=0.75, high=1.75)
    """
    in_order = sorted(measured)
    outside = math.floor((len(in_order) - 1.96 * math.sqrt(len(in_order)) - 1) / 2)
    return Ratio(statistics.median(in_order), in_order[outside], in_order[-1 - outside])
