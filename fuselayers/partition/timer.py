"""timer -- how long steps take: all of them in turns and in shuffled order, so that other load falls on each of them.

Used by `swap(timed=True)`, `fuselayers tune`, `bench` and the comparison after a training.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

_FEWEST_ROUNDS: Final = 3
# More than any GPU's second-level cache holds.
_LARGER_THAN_CACHES: Final = 1 << 28
# Time for a CPU to launch a forward, or a backward with autograd's own work.
_SECONDS_OF_LAUNCHES: Final = 5e-4


@dataclass(frozen=True)
class Step:
    """A call to be timed.

    Attributes:
        run: called with the result of `prepare`; only this is timed.
        prepare: called before each run, as for copies of inputs, or for the forward of a backward.
    """

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


def time_in_turns(
    steps: Mapping[str, Step],
    *,
    device: torch.device,
    rounds: int,
    seconds: float = math.inf,
    warm_up: int = 1,
    cold: bool = False,
) -> dict[str, list[float]]:
    """Return the seconds of each run of each step.

    Args:
        steps: what to time, by name.
        device: where the steps run; the clock waits for it.
        rounds: how often each step runs, at most.
        seconds: no round begins later than this, but there are always three.
        warm_up: rounds that come first and do not count.
        cold: on a GPU, read the GPU's own time between two events, without launches and with caches that hold nothing
            of the step. Else it is wall time, launches included.
    """
    clock = _EventClock(device) if cold and device.type == "cuda" else _WallClock(device)
    order = random.Random(0)  # leaves Python's own random numbers alone
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    for done in range(-warm_up, rounds):
        if done == 0:
            began = time.perf_counter()
        if done >= _FEWEST_ROUNDS and time.perf_counter() - began > seconds:
            break
        for name in order.sample(names, len(names)):
            prepared = steps[name].prepare()
            clock.start()
            result = steps[name].run(prepared)
            elapsed = clock.stop()
            del prepared, result  # outside of the clock, and before the next step allocates
            if done >= 0:
                times[name].append(elapsed)
    return times


def median_seconds(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of each step's times.

    >>> median_seconds({"eager": [1.0, 9.0, 2.0]})
    {'eager': 2.0}
    """
    return {name: statistics.median(taken) for name, taken in times.items()}


class _WallClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def start(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        self._started = time.perf_counter()

    def stop(self) -> float:
        """Seconds since start."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._started


class _EventClock:
    """Before each start the GPU reads more than its caches hold, until the CPU has had time to launch the step.

    Reading leaves no lines that the step would have to write back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._memory = torch.zeros(_LARGER_THAN_CACHES // 4, device=device)
        self._floods = 0
        for _ in range(3):
            self.start()
            self._flood()
            seconds = self.stop()
        self._floods = max(1, math.ceil(_SECONDS_OF_LAUNCHES / seconds))

    def _flood(self) -> None:
        self._memory.sum()

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        for _ in range(self._floods):
            self._flood()
        self._begin.record(self._stream)

    def stop(self) -> float:
        """Seconds since start."""
        self._end.record(self._stream)
        torch.cuda.synchronize(self._device)
        return float(self._begin.elapsed_time(self._end)) / 1e3
