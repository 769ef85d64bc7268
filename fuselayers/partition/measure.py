"""measure -- how long candidates take: on copies of a call's own inputs, in turns and in random order.

First again and again, so that all is near that can be, then with caches that hold something else before each call. A
step of a model is somewhere between: it finds near what the layer before left there, and little more.
"""

import contextlib
import ctypes
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.fx as fx
from torch import Tensor

from .._torch.guards import torch_compile
from .backends import main_device

__all__ = ["behind_guards", "copies_of", "seconds_of"]

_FEWEST_ROUNDS: Final = 2
_MOST_ROUNDS: Final = 20
# Rounds go on until both hold, unless they take too long for that.
_ENOUGH_ROUNDS: Final = 5
_ENOUGH_SECONDS: Final = 0.15
_TOO_MANY_SECONDS: Final = 1.0
_MORE_THAN_NEAR_CACHES: Final = 1 << 21  # floats
# Outputs, gradients and what is between them, of most graphs.
_MORE_THAN_INPUTS: Final = 4
_MOST_AT_HAND: Final = 1 << 28  # bytes
_BLOCK: Final = 1 << 24
# glibc takes blocks of this many bytes and more from the system, each by itself, and gives them back.
_ALWAYS_ALONE: Final = 1 << 25
# And these too, until one as large was freed, or a larger one.
_ALONE_AT_FIRST: Final = 1 << 17

_Run = Callable[..., Any]


def seconds_of(
    candidates: Mapping[str, _Run], inputs: Sequence[Any], *, plain: str, overwritten: frozenset[int] = frozenset()
) -> dict[str, float]:
    """Return the seconds that each candidate takes for one call, with its backward if there will be one.

    They are medians. Those of the plain candidate are the mean of calls that find near what they need, and of calls
    that do not; those of another are in proportion, by whichever of the two it does worse in against the plain one.
    What is chosen in its place shall be slower in neither.

    Args:
        candidates: functions of the inputs, which return a tensor or a tuple.
        inputs: tensors, which stay as they are, and other values.
        plain: the candidate that serves where nothing else is faster.
        overwritten: places of the inputs that a candidate writes to.
    """
    gpu = next((one.device for one in inputs if isinstance(one, Tensor) and one.is_cuda), None)
    with contextlib.nullcontext() if gpu is None else torch.cuda.device(gpu):  # which need not be the caller's
        near, far = _near_and_far(candidates, inputs, overwritten, gpu)
    mean = (near[plain] + far[plain]) / 2
    return {name: mean * max(near[name] / near[plain], far[name] / far[plain]) for name in candidates}


def _near_and_far(
    candidates: Mapping[str, _Run], inputs: Sequence[Any], overwritten: frozenset[int], gpu: torch.device | None
) -> tuple[dict[str, float], dict[str, float]]:
    wait = _nothing if gpu is None else torch.cuda.synchronize
    floats = _MORE_THAN_NEAR_CACHES
    if gpu is not None:
        floats = max(floats, torch.cuda.get_device_properties(gpu).L2_cache_size // 2)  # twice as many bytes
    elsewhere = torch.zeros(floats, device=gpu or "cpu")

    def seconds(run: _Run, *, anew: bool) -> float:
        given, leaves = copies_of(inputs, overwritten)
        if anew:
            elsewhere.add_(1.0)
        wait()
        started = time.perf_counter()
        outputs = run(*given)
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        reached = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
        reached = [one for one in reached if not any(one is other for other in given)]
        if reached:
            torch.autograd.grad(reached, leaves, [torch.ones_like(one) for one in reached], allow_unused=True)
        wait()
        return time.perf_counter() - started

    names = list(candidates)
    order = random.Random(0)  # not the user's numbers

    def median_seconds(*, anew: bool) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in names}
        began = time.perf_counter()
        for done in range(_MOST_ROUNDS):
            spent = time.perf_counter() - began
            if done >= _FEWEST_ROUNDS and spent > (_ENOUGH_SECONDS if done >= _ENOUGH_ROUNDS else _TOO_MANY_SECONDS):
                break
            for name in order.sample(names, len(names)):
                times[name].append(seconds(candidates[name], anew=anew))
        return {name: statistics.median(taken) for name, taken in times.items()}

    # The seeds that a graph draws are drawn again afterwards, so that a run has the same masks measured or not.
    cuda = [] if gpu is None else [torch.cuda.current_device()]
    # Autocast keeps what it made of a weight until the user's own `with` ends, and here every call has new weights.
    where = main_device(inputs)
    autocast = torch.autocast(
        where, dtype=torch.get_autocast_dtype(where), enabled=torch.is_autocast_enabled(where), cache_enabled=False
    )
    with torch.random.fork_rng(devices=cuda), autocast, _memory_at_hand(inputs):
        for name in names:
            seconds(candidates[name], anew=False)
        return median_seconds(anew=False), median_seconds(anew=True)


def behind_guards(run: _Run) -> _Run:
    """Return `run` with the time that Dynamo takes before it runs what was compiled.

    For a layer norm of 8 x 64 x 512 that is 15 us, of 8 x 512 x 1024, which fills the caches, 140 (two cores of an AMD
    EPYC). A graph that is run by itself does not show it, so a small function is called through Dynamo before, if the
    user still lets things be compiled.
    """
    front: Callable[[], object] | None = _front()

    def both(*inputs: Any) -> Any:
        nonlocal front
        if front is not None:
            try:
                front()
            except Exception:
                front = None
        return run(*inputs)

    return both


@functools.cache
def _front() -> Callable[[], object]:
    small = [torch.zeros(2, device="cpu") for _ in range(4)]  # as many as an op has
    compiled = torch_compile(_next_to_nothing, backend=_as_traced, recompile_limit=64, dynamic=False)
    return functools.partial(compiled, *small)


def _next_to_nothing(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a + b, c, d


def _as_traced(graph_module: fx.GraphModule, _example_inputs: Sequence[Any]) -> _Run:
    return graph_module.forward


@contextlib.contextmanager
def _memory_at_hand(inputs: Sequence[Any]) -> Iterator[None]:
    """Let the C library have some free memory that is in use by this process already.

    glibc gives what is free at the end of its heap back to the system, and who asks for it anew pays for each page:
    a layer norm of 8 x 512 x 1024 and its backward then take up to 13 ms instead of 2 (two cores of an AMD EPYC).
    Which candidate it falls on is chance. Here a block stands at the end, and what lies before it stays.

    What is left of it is glibc's limit for blocks of its heap, at its highest, as after any tensor of 31 MB.
    """
    sizes = [one.nbytes for one in inputs if isinstance(one, Tensor) and one.is_cpu]
    last = None
    try:
        if _ALONE_AT_FIRST <= max(sizes, default=0) < _ALWAYS_ALONE:
            torch.empty(_ALWAYS_ALONE - (1 << 20), dtype=torch.uint8, device="cpu")
            count = -(-min(_MORE_THAN_INPUTS * sum(sizes), _MOST_AT_HAND) // _BLOCK)
            blocks = [torch.empty(_BLOCK, dtype=torch.uint8, device="cpu") for _ in range(count + 1)]
            last = max(blocks, key=Tensor.data_ptr)
            for block in blocks:
                if block is not last:
                    block.zero_()
            del block, blocks
    except RuntimeError:  # there is not so much
        pass
    yield
    if last is not None:
        del last
        with contextlib.suppress(OSError, AttributeError, TypeError):  # a C library without it has kept nothing
            ctypes.CDLL(None).malloc_trim(0)


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
