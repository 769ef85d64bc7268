"""Times steps in turns and in shuffled order, so that other load on the machine affects all of them.

Used by `fuselayers tune` and `bench`, and the comparison after a training.
"""

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

# More than any GPU's second-level cache holds.
_LARGER_THAN_CACHES: Final = 1 << 28
# Time for a CPU to launch an op's forward, or its backward. On an H100's host 0.5 ms was sometimes too little.
_SECONDS_OF_LAUNCHES: Final = 2e-3


@dataclass(frozen=True)
class Step:
    """A call to be timed.

    Attributes:
        run: called with the result of `prepare`; only this is timed.
        prepare: called before each run, for example to copy inputs, or to run the forward of a backward.
    """

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


def time_in_turns(
    steps: Mapping[str, Step], *, device: torch.device, rounds: int, warm_up: int
) -> dict[str, list[float]]:
    """Return the seconds of each run of each step.

    On a GPU they are the GPU's own time between two events, without launches and with cold caches; on a CPU wall time.

    Args:
        steps: what to time, by name.
        device: where the steps run.
        rounds: how often each step runs.
        warm_up: rounds that come first and do not count.
    """
    timed = _gpu_timer(device) if device.type == "cuda" else _wall_seconds
    order = random.Random(0)  # does not touch Python's global generator
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for done in range(-warm_up, rounds):
        for name in order.sample(names, len(names)):
            prepared = steps[name].prepare()
            seconds = timed(steps[name].run, prepared)
            del prepared  # before the next step allocates
            if done >= 0:
                times[name].append(seconds)
    return times


def median_seconds(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of each step's times."""
    return {name: statistics.median(taken) for name, taken in times.items()}


def _wall_seconds(run: Callable[[Any], object], prepared: Any) -> float:
    started = time.perf_counter()
    result = run(prepared)
    elapsed = time.perf_counter() - started
    del result  # after the clock is read
    return elapsed


def _gpu_timer(device: torch.device) -> Callable[[Callable[[Any], object], Any], float]:
    """Return a clock of the GPU's own time.

    Before each step the GPU reads more memory than its caches hold, for as long as the CPU needs to launch the step. It
    only reads, so that the step has no dirty cache lines to write back.
    """
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    memory = torch.zeros(_LARGER_THAN_CACHES // 4, device=device)

    def timed(run: Callable[[Any], object], prepared: Any, floods: int = 0) -> float:
        torch.cuda.synchronize(device)
        for _number in range(floods):
            memory.sum()
        begin.record(stream)
        result = run(prepared)
        end.record(stream)
        torch.cuda.synchronize(device)
        del result
        return float(begin.elapsed_time(end)) / 1e3

    flood = [timed(lambda _: memory.sum(), None) for _ in range(3)][-1]
    floods = max(1, math.ceil(_SECONDS_OF_LAUNCHES / flood))
    return functools.partial(timed, floods=floods)
