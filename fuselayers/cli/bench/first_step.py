"""The first step of a compiled model: what a user waits for, with an empty compile cache and with a filled one."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final

import torch

from .measure import results
from .subjects import COMPILE, ModelCall

_CACHES: Final = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def first_steps(model: ModelCall, backend: str, *, imports: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of the first forward and backward in a process with an empty cache, and in a second process.

    Args:
        model: whose loss.
        backend: "torch.compile" of the plain model, or a backend for this library's.
        imports: modules of the user that register components.
    """
    before = {name: os.environ.get(name) for name in _CACHES}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({name: os.path.join(folder, name) for name in _CACHES})  # the processes inherit it
        try:
            cold, warm = (_in_a_process(model, backend, imports) for _ in range(2))
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value
    return cold, warm


def _in_a_process(model: ModelCall, backend: str, imports: Sequence[str]) -> float:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_first_step, model, backend, imports).result()


def _first_step(model: ModelCall, backend: str, imports: Sequence[str]) -> float:
    for module in imports:
        __import__(module)
    _, theirs, ours, _ = model.forms([backend])
    candidate = theirs[-1] if backend == COMPILE else ours[-1]
    started = time.perf_counter()
    results(candidate)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
