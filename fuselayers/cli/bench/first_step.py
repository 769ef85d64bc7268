"""The time of a compiled model's first step, with an empty compile cache and with a filled one."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final
from unittest import mock

import torch

from .subjects import ModelCall, first_candidate

_CACHES: Final = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def first_steps(call: ModelCall, name: str, *, imports: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of the first forward and backward in a process with an empty cache, and in a second process.

    The time of imports and of building the model is not counted.

    Args:
        call: the model.
        name: "torch.compile" of the plain model, or the backend of a fused model, as its config fuses it.
        imports: modules of the user that register components.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {cache: os.path.join(folder, cache) for cache in _CACHES}),
    ):
        cold, warm = (_in_a_process(call, name, imports) for _ in range(2))
    return cold, warm


def _in_a_process(call: ModelCall, name: str, imports: Sequence[str]) -> float:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_first_step, call, name, imports).result()


def _first_step(call: ModelCall, name: str, imports: Sequence[str]) -> float:
    for module in imports:
        __import__(module)
    candidate = first_candidate(call, name)
    torch.compile(torch.nn.Identity())  # imports Dynamo, which `fuse` does at its first call
    started = time.perf_counter()
    torch.autograd.grad(candidate.call(), candidate.leaves)
    if call.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
