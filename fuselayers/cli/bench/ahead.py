"""Compiles for the suite in processes of their own. Their caches on disk, Triton's and Inductor's, serve it later."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable


def compile_ahead(
    calls: Iterable[Callable[[], object]], *, workers: int, seconds: float, say: Callable[[str], None]
) -> int:
    """Make calls in spawned processes; say and return how many succeeded.

    Inductor finds what they compiled only if no global of the main module is called `torch`: its keys are pickles, and
    pickle names the first module in which it finds one of torch's objects.

    Args:
        calls: partials of a module's functions, the first of which are called first. Their errors and what they print
            are dropped.
        workers: the number of processes.
        seconds: calls that have not ended by then are stopped.
        say: gets a line before and after.
    """
    say(f"compiling, on {workers} processes")
    deadline = time.monotonic() + seconds
    # A forked process could not use CUDA.
    with multiprocessing.get_context("spawn").Pool(workers, initializer=_start) as pool:
        started = [pool.apply_async(_succeeds, (call,)) for call in calls]
        for one in started:
            one.wait(max(0.0, deadline - time.monotonic()))
        done = sum(one.ready() and one.get() for one in started)
    say(f"compiled {done} of {len(started)}")
    return done


def _start() -> None:
    import torch._inductor.config as config

    config.compile_threads = 1  # else every worker starts a pool of its own
    # Inductor chooses among some kernels by their times, which mean nothing while other workers use the GPU.
    config.autotune_local_cache = False
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(quiet, stream.fileno())


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # as lack of memory beside the other workers; the suite compiles it by itself
        return False
    return True
