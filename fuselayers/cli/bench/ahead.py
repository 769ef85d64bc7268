"""Compiles for the suite in processes of their own. Their caches on disk, Triton's and Inductor's, serve it later."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any


def compile_ahead(
    calls: Iterable[Callable[[], object]], *, workers: int, minutes: float, say: Callable[[str], None]
) -> None:
    """Make the calls of `run_ahead`, for `minutes` at most, and say how many succeeded."""
    say(f"compiling, on {workers} processes")
    done = run_ahead(calls, workers=workers, seconds=60 * minutes)
    say(f"compiled {sum(one is not None for one in done)} of {len(done)}")


def run_ahead(calls: Iterable[Callable[[], object]], *, workers: int, seconds: float) -> list[Any]:
    """Make calls in spawned processes, and return what each returned; None for those that failed or had no time.

    Inductor finds what they compiled only if no global of the main module is called `torch`: its keys are pickles, and
    pickle names the first module in which it finds one of torch's objects.

    Args:
        calls: partials of a module's functions, the first of which are called first. Their errors and what they print
            are dropped.
        workers: the number of processes.
        seconds: calls that have not ended by then are stopped.
    """
    deadline = time.monotonic() + seconds
    # A forked process could not use CUDA.
    with multiprocessing.get_context("spawn").Pool(workers, initializer=_start) as pool:
        started = [pool.apply_async(_result, (call,)) for call in calls]
        for one in started:
            one.wait(max(0.0, deadline - time.monotonic()))
        return [one.get() if one.ready() else None for one in started]


def _start() -> None:
    import torch._inductor.config as config

    config.compile_threads = 1  # else every worker starts a pool of its own
    # Inductor chooses among some kernels by their times, which mean nothing while other workers use the GPU.
    config.autotune_local_cache = False
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(quiet, stream.fileno())


def _result(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception:  # as lack of memory beside the other workers; the suite compiles it by itself
        return None
