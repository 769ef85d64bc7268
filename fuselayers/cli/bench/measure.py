"""Checks that candidates agree, and measures time, memory and bytes kept for backward."""

import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ...partition import saved_bytes
from ..timer import Step, median_seconds, time_in_turns

PLAIN: Final = "plain"
COMPILE: Final = "torch.compile"
_WARM_UP: Final = 3
# Two correct computations differ by a few units in the last place even where eager happens to have no error at all.
_SLACK: Final = 16
# In bfloat16 the last place is 0.8 % of a value, and eager rounds after each op.
_SLACK_OF_16_BITS: Final = 2


@dataclass(frozen=True)
class Candidate:
    """One implementation of an op or a model.

    Attributes:
        name: its name in the table.
        call: one forward with its inputs.
        leaves: the tensors whose gradients a backward computes.
    """

    name: str
    call: Callable[[], tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    """An op or a model.

    Attributes:
        title: of the op or the model, with its options.
        shape: of x, or of a batch.
        dtype: as "float32".
        candidates: those with right numbers, plain PyTorch first.
        wrong: the errors of the candidates with wrong numbers, by name.
        inputs: tensors that do not count as kept for backward.
        floor: bytes that forward and backward must move; None where bandwidth is no limit.
    """

    title: str
    shape: tuple[int, ...]
    dtype: str
    candidates: list[Candidate]
    wrong: dict[str, str]
    inputs: tuple[Tensor, ...] = ()
    floor: tuple[float, float] | None = None


@dataclass(frozen=True)
class Measured:
    """The measurements of one candidate of a subject.

    Attributes:
        dtype: as "float32".
        seconds: every repeat, of "forward" and of "forward_backward".
        peak: peak bytes of forward and backward, without the inputs; None on a CPU.
        kept: bytes saved for backward, without the inputs.
        floor: bytes that "forward" and "forward_backward" must move; empty where bandwidth is no limit.
        first_step: seconds of a compiled model's first step, with an empty compile cache and with a filled one.
    """

    title: str
    shape: tuple[int, ...]
    dtype: str
    candidate: str
    seconds: dict[str, list[float]]
    peak: int | None
    kept: int
    floor: dict[str, float]
    first_step: tuple[float, float] | None = None

    def median(self, span: str) -> float:
        """Median seconds of one of the two spans."""
        return statistics.median(self.seconds[span])


def measure(subject: Subject, *, repeats: int, device: torch.device) -> list[Measured]:
    """Time all candidates in turns, and count the bytes of each."""
    times = time_interleaved(subject.candidates, repeats=repeats, device=device)
    floor = {} if subject.floor is None else {"forward": subject.floor[0], "forward_backward": sum(subject.floor)}
    return [
        Measured(
            title=subject.title,
            shape=subject.shape,
            dtype=subject.dtype,
            candidate=candidate.name,
            seconds=times[candidate.name],
            peak=_peak_bytes(candidate, device=device),
            kept=saved_bytes(candidate.call, parameters=[*subject.inputs, *candidate.leaves]),
            floor=floor,
        )
        for candidate in subject.candidates
    ]


def results(candidate: Candidate) -> dict[str, Tensor]:
    """The outputs of a forward, and the gradients of a weighted sum of them; weights and dropout masks are fixed."""
    torch.manual_seed(0)
    outputs = candidate.call()
    gradients = torch.autograd.grad(outputs, candidate.leaves, _weights(outputs))
    named = {f"output {index}": output for index, output in enumerate(outputs)}
    return named | {f"gradient {index}": gradient for index, gradient in enumerate(gradients)}


def wrong_numbers(candidates: Sequence[Candidate], *, eager: Candidate, truth: Candidate) -> dict[str, str]:
    """Return the error of each wrong candidate, by name. `eager` sets the limit by its own error against `truth`."""
    limit, exact = results(eager), results(truth)
    reasons = {candidate.name: disagreement(results(candidate), eager=limit, truth=exact) for candidate in candidates}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def disagreement(got: dict[str, Tensor], *, eager: dict[str, Tensor], truth: dict[str, Tensor]) -> str | None:
    """Return where a candidate is wrong, or None if it is right.

    Against the truth in float64, each output and gradient may have twice the error of eager PyTorch in the same dtype,
    plus rounding (the rule of FlashAttention's tests).
    """
    for name, exact in truth.items():
        error, eager_error = ((form[name].double() - exact).abs().max().item() for form in (got, eager))
        dtype = eager[name].dtype
        units = _SLACK if dtype.itemsize > 2 else _SLACK_OF_16_BITS
        # Not `error > limit`, which is false for a NaN.
        if not error <= 2 * eager_error + units * torch.finfo(dtype).eps * exact.abs().max().item():
            return f"{name} is off by {error:.1e}, eager PyTorch by {eager_error:.1e}, both against float64"
    return None


def time_interleaved(
    candidates: Sequence[Candidate], *, repeats: int, device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """Time "forward" and "forward_backward" of all candidates in turns; return every repeat's seconds, by name.

    On a GPU the time is the GPU's own, between two events, with cold caches.
    """
    steps: dict[str, Step] = {}
    for candidate in candidates:
        steps[f"{candidate.name} forward"], steps[f"{candidate.name} backward"] = _steps_of(candidate)
    times = time_in_turns(steps, device=device, rounds=repeats, warm_up=_WARM_UP)
    spans = {}
    for candidate in candidates:
        forward, backward = times[f"{candidate.name} forward"], times[f"{candidate.name} backward"]
        spans[candidate.name] = {"forward": forward, "forward_backward": list(map(operator.add, forward, backward))}
    return spans


def _steps_of(candidate: Candidate) -> tuple[Step, Step]:
    def prepare() -> tuple[tuple[Tensor, ...], list[Tensor]]:
        outputs = candidate.call()
        return outputs, [torch.ones_like(output) for output in outputs]

    def backward(prepared: tuple[tuple[Tensor, ...], list[Tensor]]) -> tuple[Tensor, ...]:
        outputs, weights = prepared
        return torch.autograd.grad(outputs, candidate.leaves, weights, allow_unused=True)

    return Step(lambda _: candidate.call()), Step(backward, prepare)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of copying a large tensor: the upper limit for the kernels of ops."""
    source = torch.ones((1 << 30) if device.type == "cuda" else (1 << 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = Step(lambda _: target.copy_(source))
    times = time_in_turns({"copy": copy}, device=device, rounds=10, warm_up=_WARM_UP)
    return 2 * source.nbytes / median_seconds(times)["copy"]


def _peak_bytes(candidate: Candidate, *, device: torch.device) -> int | None:
    """The peak bytes of a forward with its backward, without its inputs; None where torch does not count them."""
    if device.type != "cuda":
        return None
    weights = [torch.ones_like(output) for output in candidate.call()]
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    gradients = torch.autograd.grad(candidate.call(), candidate.leaves, weights)
    torch.cuda.synchronize(device)
    del gradients
    return torch.cuda.max_memory_allocated(device) - before


def _weights(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return random gradients of the outputs. With ones, an error that sums to zero would not show."""
    weights = []
    for number, output in enumerate(outputs):
        # Drawn in float32 for every dtype, so that the float64 truth gets the same; on the device, for speed.
        generator = torch.Generator(output.device).manual_seed(1000 + number)
        weights.append(torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype))
    return weights
