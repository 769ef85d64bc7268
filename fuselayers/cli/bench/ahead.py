"""Compiles for the suite in processes of their own. Their caches on disk, Triton's and Inductor's, serve it later."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any


def run_ahead(function: Callable[..., object], jobs: Iterable[tuple[Any, ...]], *, workers: int, seconds: float) -> int:
    """Call a function with the arguments of each job in spawned processes, and return how many calls succeeded.

    Inductor finds what they compiled only if no global of the main module is called `torch`: its keys are pickles, and
    pickle names the first module in which it finds one of torch's objects.

    Args:
        function: a module's function. Its result is dropped, and so are its errors and what it prints.
        jobs: the arguments; the first are called first.
        workers: the number of processes.
        seconds: calls that have not ended by then are stopped.
    """
    deadline = time.monotonic() + seconds
    # A forked process could not use CUDA.
    with multiprocessing.get_context("spawn").Pool(workers, initializer=_start) as pool:
        calls = [pool.apply_async(_succeeds, (function, job)) for job in jobs]
        for call in calls:
            call.wait(max(0.0, deadline - time.monotonic()))
        return sum(call.get() for call in calls if call.ready())


def _start() -> None:
    import torch._inductor.config as config

    config.compile_threads = 1  # else every worker starts a pool of its own
    # Inductor chooses among some kernels by their times, which mean nothing while other workers use the GPU.
    config.autotune_local_cache = False
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(quiet, stream.fileno())


def _succeeds(function: Callable[..., object], job: tuple[Any, ...]) -> bool:
    try:
        function(*job)
    except Exception:  # as lack of memory beside the other workers; the suite compiles it by itself
        return False
    return True
