"""What a call of an op costs the CPU, beside a bare `torch.autograd.Function` that computes nothing."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ...partition.timer import Step, time_in_turns
from .cases import OpCase
from .measure import EAGER, OURS, Candidate
from .subjects import op_candidate

__all__ = ["BARE", "CallCost", "call_cost"]

BARE: Final = "bare"
# Calls in each reading; the GPU's own time disappears in so many.
_CALLS: Final = 20
_WARM_UP: Final = 3
_SEED: Final = 5


@dataclass(frozen=True)
class CallCost:
    """What the calls of one op cost the CPU.

    Args:
        title: of the op and its options.
        seconds: of each candidate, for "forward" and "forward_backward", every reading, in seconds per call.
    """

    title: str
    seconds: dict[str, dict[str, list[float]]]

    def median(self, candidate: str, span: str) -> float:
        """Seconds of a call."""
        return statistics.median(self.seconds[candidate][span])


def call_cost(title: str, case: OpCase, *, readings: int, device: torch.device) -> CallCost:
    """Time calls of an op, of the plain function, and of a bare `torch.autograd.Function`.

    The bare one allocates tensors like the op's outputs and gradients, and saves its inputs. It checks, decides and
    launches nothing.

    Args:
        title: of the op and its options.
        case: the op, on tensors so small that the GPU does not hold the CPU up.
        readings: how many of each candidate and span, in turns.
        device: where the tensors are; one with kernels.
    """
    seeded = {**case.options, "seed": torch.tensor(_SEED, device=device)} if case.options.get("p") else case.options

    def with_kernels(*tensors: Tensor, **named: Tensor) -> Any:
        return case.op(*tensors, **{**named, **seeded}, backend="triton")

    own = op_candidate(OURS, OpCase(with_kernels, case.plain, case.tensors, {}), with_kernels)
    steps: dict[str, Step] = {}
    for one in (op_candidate(EAGER, case, case.plain), own, _bare(own)):
        steps[f"{one.name} forward"] = Step(partial(_repeat, one.call))
        steps[f"{one.name} forward_backward"] = Step(partial(_repeat, _with_backward(one)))
    times = time_in_turns(steps, device=device, rounds=readings, warm_up=_WARM_UP)
    seconds = {
        name: {span: [taken / _CALLS for taken in times[f"{name} {span}"]] for span in ("forward", "forward_backward")}
        for name in (EAGER, OURS, BARE)
    }
    return CallCost(title, seconds)


def _repeat(call: Callable[[], object], _: object) -> None:
    for _ in range(_CALLS):
        call()


def _with_backward(candidate: Candidate) -> Callable[[], Sequence[Tensor]]:
    weights = [torch.ones_like(one) for one in candidate.call()]
    return lambda: torch.autograd.grad(candidate.call(), candidate.leaves, weights, allow_unused=True)


def _bare(own: Candidate) -> Candidate:
    outputs = [one.detach() for one in own.call()]

    def call() -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = _Bare.apply(outputs, *own.leaves)  # type: ignore[no-untyped-call]
        return made

    return Candidate(BARE, call, own.leaves)


class _Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Sequence[Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*leaves)
        return tuple(map(torch.empty_like, outputs))

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *map(torch.empty_like, ctx.saved_tensors))
