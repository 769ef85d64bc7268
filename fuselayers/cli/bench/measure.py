"""Whether candidates agree, and how long each takes."""

import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from ...partition.timer import Step, median_seconds, time_in_turns

EAGER: Final = "eager"
OURS: Final = "fuselayers"

_WARM_UP = 3
_CALLS: Final = 50  # in one reading of the clock
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
    _restore(candidate)
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
    """Time the forward and the backward of all candidates in turns.

    On a GPU the time is the GPU's own, between two events, with nothing of the inputs in its caches.

    Args:
        candidates: what is timed; each runs a few times before.
        repeats: how often each is timed, forward alone and backward alone.
        device: where the tensors are.
    """
    steps: dict[str, Step] = {}
    for number, candidate in enumerate(candidates):
        steps[f"{number} forward"] = Step(partial(_forward, candidate), partial(_restore, candidate))
        steps[f"{number} backward"] = Step(partial(_backward, candidate), partial(_forward_with_weights, candidate))
    times = time_in_turns(steps, device=device, rounds=repeats, warm_up=_WARM_UP, cold=True)
    pairs = [(times[f"{number} forward"], times[f"{number} backward"]) for number in range(len(candidates))]
    return [Timing(forward, list(map(operator.add, forward, backward))) for forward, backward in pairs]


def host_times(candidates: Sequence[Candidate], *, repeats: int, device: torch.device) -> list[Timing]:
    """Seconds of each candidate's call on one thread: what a call costs the host, if its tensors are small.

    A reading is of many calls, whose kernels queue on a GPU.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one would wait for work
    try:
        steps = {f"{number} forward": Step(partial(_calls, one.call)) for number, one in enumerate(candidates)}
        steps |= {f"{number} both": Step(partial(_calls, _with_backward(one))) for number, one in enumerate(candidates)}
        times = time_in_turns(steps, device=device, rounds=repeats, warm_up=_WARM_UP)
    finally:
        torch.set_num_threads(threads)
    each = {name: [reading / _CALLS for reading in readings] for name, readings in times.items()}
    return [Timing(each[f"{number} forward"], each[f"{number} both"]) for number in range(len(candidates))]


def _calls(call: Callable[[], object], _: object) -> None:
    for _ in range(_CALLS):
        call()


def _with_backward(candidate: Candidate) -> Callable[[], object]:
    weights = [torch.ones_like(output) for output in candidate.call()]
    return lambda: torch.autograd.grad(candidate.call(), candidate.leaves, weights)


def _restore(candidate: Candidate) -> None:
    if candidate.restore is not None:
        candidate.restore()


def _forward(candidate: Candidate, _: object) -> tuple[Tensor, ...]:
    return candidate.call()


def _forward_with_weights(candidate: Candidate) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    _restore(candidate)
    outputs = candidate.call()
    return outputs, [torch.ones_like(output) for output in outputs]


def _backward(candidate: Candidate, forward: tuple[tuple[Tensor, ...], list[Tensor]]) -> tuple[Tensor, ...]:
    outputs, weights = forward
    return torch.autograd.grad(outputs, candidate.leaves, weights)


def peak_bytes(candidate: Candidate, *, device: torch.device) -> int | None:
    """Bytes that a forward with its backward takes at most, beside its inputs; None where torch does not count them."""
    if device.type != "cuda":
        return None
    _restore(candidate)
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
    copy = Step(lambda _: target.copy_(source))
    times = time_in_turns({"copy": copy}, device=device, rounds=10, warm_up=_WARM_UP, cold=True)
    return 2 * source.nbytes / median_seconds(times)["copy"]


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
    """Return the outputs' gradients in backward: not all one, or an error that sums to zero would not show."""
    weights = []
    for number, output in enumerate(outputs):
        # In float32 for every dtype, so that the truth in float64 has the same; on the device, where it takes no time.
        generator = torch.Generator(output.device).manual_seed(1000 + number)
        weights.append(torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype))
    return weights


def _error(got: Tensor, exact: Tensor) -> float:
    return (got.double() - exact).abs().max().item()
