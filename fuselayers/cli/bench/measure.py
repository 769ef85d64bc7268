"""Whether candidates agree, and how long each takes."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..machine import synchronize

__all__ = ["Candidate", "Results", "Timing", "disagreement", "results", "spread", "time_interleaved"]

_WARMUP = 3
# Two right computations differ by a few units in the last place even where eager happens to have no error at all.
_SLACK = 16


@dataclass(frozen=True)
class Candidate:
    """One way to compute the same.

    Args:
        name: how it is called in the table.
        call: one forward with its inputs.
        leaves: the tensors whose gradients a backward computes.
    """

    name: str
    call: Callable[[], tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...]


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
            slack = _SLACK * torch.finfo(theirs.dtype).eps * exact.abs().max().item()
            # Not `error > limit`: a NaN would pass that.
            if not error <= 2 * eager_error + slack:
                return (
                    f"{kind[:-1]} {index} is off by {error:.1e}, eager PyTorch by {eager_error:.1e}, "
                    f"both against float64"
                )
    return None


def time_interleaved(candidates: Sequence[Candidate], *, repeats: int, device: torch.device) -> list[Timing]:
    """Time all candidates in turns, so that whatever else the machine does falls on each of them alike.

    Args:
        candidates: what is timed; each is called a few times before.
        repeats: how often each is timed, forward alone and with backward.
        device: where the tensors are.
    """
    timings = [Timing() for _ in candidates]
    for repeat in range(_WARMUP + repeats):
        for candidate, timing in zip(candidates, timings, strict=True):
            synchronize(device)
            started = time.perf_counter()
            outputs = candidate.call()
            synchronize(device)
            forward = time.perf_counter() - started
            weights = _weights(outputs)
            synchronize(device)
            started = time.perf_counter()
            gradients = torch.autograd.grad(outputs, candidate.leaves, weights)
            synchronize(device)
            backward = time.perf_counter() - started
            # Freed outside of the clock, and before the next candidate asks for memory.
            del outputs, gradients, weights
            if repeat >= _WARMUP:
                timing.forward.append(forward)
                timing.both.append(forward + backward)
    return timings


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
        generator = torch.Generator().manual_seed(1000 + number)
        weights.append(torch.randn(output.shape, generator=generator).to(output.device, output.dtype))
    return weights


def _error(got: Tensor, exact: Tensor) -> float:
    return (got.double() - exact).abs().max().item()
