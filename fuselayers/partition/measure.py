"""measure -- how long candidates for a graph take: on copies of a call's own inputs, in turns and in random order."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .backends import UNFUSED, main_device

__all__ = ["copies_of", "seconds_of"]

_MOST_ROUNDS: Final = 9
_FEWEST_ROUNDS: Final = 3
# A measurement of a large graph stops here, once it has its fewest rounds.
_ENOUGH_SECONDS: Final = 2.0
# What Dynamo's guards take before a compiled graph runs: 11 us in a loop, three times that where the caches hold
# something else, as between other calls (two cores of an AMD EPYC). An unfused function is called without them.
_FRONT_SECONDS: Final = 35e-6

_Run = Callable[..., Any]


def seconds_of(
    candidates: Mapping[str, _Run], inputs: Sequence[Any], *, overwritten: frozenset[int]
) -> dict[str, float]:
    """Return the least seconds that each candidate takes for one call, with its backward if there will be one."""
    wait = torch.cuda.synchronize if main_device(inputs) == "cuda" else _nothing

    def seconds(run: _Run) -> float:
        given, leaves = copies_of(inputs, overwritten)
        wait()
        started = time.perf_counter()
        outputs = run(*given)
        reached = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
        if reached:
            torch.autograd.grad(reached, leaves, [torch.ones_like(one) for one in reached], allow_unused=True)
        wait()
        return time.perf_counter() - started

    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)  # not the user's numbers
    # The seeds that a graph draws are drawn again afterwards, so that a run has the same masks measured or not.
    cuda = [torch.cuda.current_device()] if main_device(inputs) == "cuda" else []
    # Autocast keeps what it made of a weight until the user's own `with` ends, and here every call has new weights.
    where = main_device(inputs)
    autocast = torch.autocast(
        where, dtype=torch.get_autocast_dtype(where), enabled=torch.is_autocast_enabled(where), cache_enabled=False
    )
    with torch.random.fork_rng(devices=cuda), autocast:
        for name in names:
            seconds(candidates[name])
        began = time.perf_counter()
        for done in range(_MOST_ROUNDS):
            if done >= _FEWEST_ROUNDS and time.perf_counter() - began > _ENOUGH_SECONDS:
                break
            for name in order.sample(names, len(names)):
                times[name].append(seconds(candidates[name]))
    # What else the machine does only makes a call longer: the least is the most like the call itself.
    return {name: min(taken) + (0.0 if name == UNFUSED else _FRONT_SECONDS) for name, taken in times.items()}


def copies_of(inputs: Sequence[Any], overwritten: frozenset[int] = frozenset()) -> tuple[list[Any], list[Tensor]]:
    """Inputs to call a candidate with, and what of them is differentiated. They share memory where nobody writes."""
    given, leaves = [], []
    for place, one in enumerate(inputs):
        if not isinstance(one, Tensor):
            given.append(one)
            continue
        copy = one.detach().clone() if place in overwritten else one.detach()
        if one.requires_grad:
            leaves.append(copy.requires_grad_())
        # A leaf cannot be overwritten.
        given.append(copy.clone() if place in overwritten and one.requires_grad else copy)
    return given, leaves


def _nothing() -> None:
    pass
