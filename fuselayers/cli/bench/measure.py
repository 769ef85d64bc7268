"""Whether candidates agree, and how long each takes."""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

__all__ = [
    "EAGER",
    "OURS",
    "Candidate",
    "Results",
    "Timing",
    "copy_bandwidth",
    "disagreement",
    "peak_bytes",
    "results",
    "spread",
    "time_interleaved",
]

EAGER: Final = "eager"
OURS: Final = "fuselayers"

_WARMUP = 3
# More than any GPU's second-level cache holds.
_LARGER_THAN_CACHES = 1 << 28
# In which a CPU has made the launches of a forward, or of a backward with autograd's own work.
_SECONDS_OF_LAUNCHES = 5e-4
# Two right computations differ by a few units in the last place even where eager happens to have no error at all.
_SLACK = 16
# There the last place is 0.8 % in bfloat16, and eager rounds after each op.
_SLACK_OF_16_BITS = 2


@dataclass(frozen=True)
class Candidate:
    """One way to compute the same.

    Args:
        name: how it is called in the table.
        call: one forward with its inputs.
        leaves: the tensors whose gradients a backward computes.
        restore: is called before each call, outside of the clock; for one that overwrites its inputs.
    """

    name: str
    call: Callable[[], tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...]
    restore: Callable[[], None] | None = None


@dataclass(frozen=True)
class Results:
    """The outputs of a forward, and the gradients of a fixed weighted sum of them."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat: of a forward, and of a forward with its backward."""

    forward: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)


def results(candidate: Candidate, *, seed: int = 0) -> Results:
    """Run forward and backward once, with the dropout masks that `seed` gives."""
    torch.manual_seed(seed)
    if candidate.restore is not None:
        candidate.restore()
    outputs = candidate.call()
    return Results(outputs, torch.autograd.grad(outputs, candidate.leaves, _weights(outputs), allow_unused=False))


def disagreement(got: Results, *, eager: Results, truth: Results) -> str | None:
    """Say where a candidate is wrong, or None when it is right.

    It is right when each output and gradient is at most twice as far from the truth in float64 as eager PyTorch is in
    the same dtype, give or take rounding (the rule of FlashAttention's tests).

    Args:
        got: what the candidate computed.
        eager: the same in eager mode, in the same dtype.
        truth: the same in float64.
    """
    for kind in ("outputs", "gradients"):
        triples = zip(getattr(got, kind), getattr(eager, kind), getattr(truth, kind), strict=True)
        for index, (mine, theirs, exact) in enumerate(triples):
            if not exact.numel():
                continue
            error, eager_error = _error(mine, exact), _error(theirs, exact)
            units = _SLACK if theirs.dtype.itemsize > 2 else _SLACK_OF_16_BITS
            slack = units * torch.finfo(theirs.dtype).eps * exact.abs().max().item()
            # Not `error > limit`: a NaN would pass that.
            if not error <= 2 * eager_error + slack:
                return (
                    f"{kind[:-1]} {index} is off by {error:.1e}, eager PyTorch by {eager_error:.1e}, "
                    f"both against float64"
                )
    return None


def time_interleaved(candidates: Sequence[Candidate], *, repeats: int, device: torch.device) -> list[Timing]:
    """Time all candidates in turns, so that whatever else the machine does falls on each of them alike.

    Each round has an order of its own: what one leaves in the caches, its neighbour pays for.
    On a GPU the time is the GPU's own, between two events, with nothing of the inputs in its caches.

    Args:
        candidates: what is timed; each is called a few times before.
        repeats: how often each is timed, forward alone and with backward.
        device: where the tensors are.
    """
    timings = [Timing() for _ in candidates]
    pairs = list(zip(candidates, timings, strict=True))
    orders = random.Random(0)
    clock = _GPUClock(device) if device.type == "cuda" else _Clock()
    weights: list[Tensor] = []
    for repeat in range(_WARMUP + repeats):
        for candidate, timing in orders.sample(pairs, len(pairs)):
            if candidate.restore is not None:
                candidate.restore()
            clock.start()
            outputs = candidate.call()
            forward = clock.stop()
            if [(one.shape, one.dtype) for one in weights] != [(one.shape, one.dtype) for one in outputs]:
                weights = [torch.randn_like(output) for output in outputs]
            clock.start()
            gradients = torch.autograd.grad(outputs, candidate.leaves, weights)
            backward = clock.stop()
            # Freed outside of the clock, and before the next candidate asks for memory.
            del outputs, gradients
            if repeat >= _WARMUP:
                timing.forward.append(forward)
                timing.both.append(forward + backward)
    return timings


class _Clock:
    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> float:
        """Seconds since start."""
        return time.perf_counter() - self._started


class _GPUClock:
    """A clock on the GPU's own time line, whose caches hold nothing of what is timed.

    While the GPU overwrites its caches, as often as it needs to be busy for half a millisecond, the CPU prepares the
    launches, as it has time to in a step of a training. What they cost the CPU is measured in `calls`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._flood = torch.empty(_LARGER_THAN_CACHES, dtype=torch.uint8, device=device)
        self._floods = 1
        for _ in range(_WARMUP):
            torch.cuda.synchronize(device)
            self._begin.record(self._stream)
            self._flood.zero_()
            seconds = self.stop()
        self._floods = max(1, math.ceil(_SECONDS_OF_LAUNCHES / seconds))

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        for _ in range(self._floods):
            self._flood.zero_()
        self._begin.record(self._stream)

    def stop(self) -> float:
        """Seconds since start."""
        self._end.record(self._stream)
        torch.cuda.synchronize(self._device)
        return float(self._begin.elapsed_time(self._end)) / 1e3


def peak_bytes(candidate: Candidate, *, device: torch.device) -> int | None:
    """Bytes that a forward with its backward takes at most, beside its inputs; None where torch does not count them."""
    if device.type != "cuda":
        return None
    if candidate.restore is not None:
        candidate.restore()
    weights = [torch.ones_like(output) for output in candidate.call()]
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    gradients = torch.autograd.grad(candidate.call(), candidate.leaves, weights)
    torch.cuda.synchronize(device)
    del gradients
    return torch.cuda.max_memory_allocated(device) - before


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of copying a large tensor: what no kernel of an op can exceed."""
    source = torch.ones((1 << 30) if device.type == "cuda" else (1 << 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = _GPUClock(device) if device.type == "cuda" else _Clock()
    seconds = []
    for _ in range(_WARMUP + 10):
        clock.start()
        target.copy_(source)
        seconds.append(clock.stop())
    return 2 * source.nbytes / statistics.median(seconds[_WARMUP:])


def spread(seconds: Sequence[float]) -> float:
    """Half the distance between the quartiles, over the median: 0.05 is "give or take 5 %".

    >>> spread([1.0, 2.0, 3.0])
    0.5
    """
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / 2 / middle


def _weights(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What the outputs are weighted with in backward: not all one, or a mistake that sums to zero would hide."""
    weights = []
    for number, output in enumerate(outputs):
        # In float32 for every dtype, so that the truth in float64 has the same; on the device, where it takes no time.
        generator = torch.Generator(output.device).manual_seed(1000 + number)
        weights.append(torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype))
    return weights


def _error(got: Tensor, exact: Tensor) -> float:
    return (got.double() - exact).abs().max().item()
