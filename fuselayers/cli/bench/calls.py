"""What a call of an op costs the CPU that launches its kernels, beside the least that such a call could cost."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from ...ops.forms import Replayed, replayed
from .cases import OpCase
from .measure import EAGER, OURS, Candidate
from .subjects import op_candidate

__all__ = ["BARE", "CallCost", "call_cost"]

BARE: Final = "bare"
# Until an op writes down what it does for calls like these, and what torch does at its first calls is done.
_WARMUP: Final = 5
# One reading is of so many calls in a row, which the GPU does not hold up.
_CALLS: Final = 20
_SEED: Final = 5


@dataclass(frozen=True)
class CallCost:
    """What the calls of one op cost the CPU.

    Args:
        title: of the op and its options.
        seconds: of each candidate, for "forward" and "forward_backward", every reading, in seconds for a call.
    """

    title: str
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def median(self, candidate: str, span: str) -> float:
        """Seconds of a call."""
        return statistics.median(self.seconds[candidate][span])


def call_cost(title: str, case: OpCase, *, readings: int, device: torch.device) -> CallCost | None:
    """Time calls of an op, of the plain function, and of a bare `torch.autograd.Function` that does the same work.

    The bare one makes the op's tensors, launches its kernels and saves its inputs, and knows all of it beforehand. It
    checks nothing, decides nothing, and gives autograd gradients that lie ready. Its work is the op's, so that what the
    op does too much there counts for both.

    Args:
        title: of the op and its options.
        case: the op, on tensors so small that the GPU does not hold the CPU up.
        readings: how many of each candidate and span, in turns.
        device: where the tensors are, which has kernels.

    Returns:
        None for an op whose calls are not written down, see `ops.forms.replay`.
    """
    seeded = {**case.options, "seed": torch.tensor(_SEED, device=device)} if case.options.get("p") else case.options

    def with_kernels(*tensors: Tensor, **named: Tensor) -> Any:
        return case.op(*tensors, **{**named, **seeded}, backend="triton")

    own = op_candidate(OURS, OpCase(with_kernels, case.plain, case.tensors, {}), with_kernels)
    bare = _bare(own)
    if bare is None:
        return None
    candidates = [op_candidate(EAGER, case, case.plain), own, bare]
    cost = CallCost(title, {one.name: {"forward": [], "forward_backward": []} for one in candidates})
    spans: list[tuple[list[float], Callable[[], object]]] = []
    for one in candidates:
        spans.append((cost.seconds[one.name]["forward"], one.call))
        spans.append((cost.seconds[one.name]["forward_backward"], _with_backward(one)))
    for _, call in spans:
        for _ in range(_WARMUP):
            call()
    orders = random.Random(0)
    for _ in range(readings):
        for seconds, call in orders.sample(spans, len(spans)):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            for _ in range(_CALLS):
                call()
            seconds.append((time.perf_counter() - started) / _CALLS)
    return cost


def _with_backward(candidate: Candidate) -> Callable[[], Sequence[Tensor]]:
    weights = [torch.ones_like(one) for one in candidate.call()]
    return lambda: torch.autograd.grad(candidate.call(), candidate.leaves, weights, allow_unused=True)


def _bare(own: Candidate) -> Candidate | None:
    run = _with_backward(own)
    for _ in range(_WARMUP):
        run()
    with replayed() as forward:
        own.call()
    with replayed() as both:
        gradients = run()
    if len(forward) != 1:
        return None

    def call() -> tuple[Tensor, ...]:
        made = _Bare.apply(forward[0], both[1:], gradients, *own.leaves)  # type: ignore[no-untyped-call]
        return made if isinstance(made, tuple) else (made,)

    return Candidate(BARE, call, own.leaves)


class _Bare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        work: Replayed,
        later: Sequence[Replayed],
        gradients: Sequence[Tensor],
        *leaves: Tensor,
    ) -> Any:
        ctx.save_for_backward(*leaves)
        ctx.later, ctx.gradients = later, gradients
        results, _ = _done(work)  # and what the op saves
        return results

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        for one in ctx.later:
            _done(one)
        return (None, None, None, *ctx.gradients)


def _done(work: Replayed) -> Any:
    return work.replay(*work.arguments)
