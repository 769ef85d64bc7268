"""The CPU time of a call of an op that launches kernels. The launches are stubbed, so only Python is timed."""

import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..._torch.dispatch import TorchDispatchMode
from ...ops.implementations.launch import stubbed_launches
from .cases import OpCase
from .measure import OURS, Candidate
from .subjects import op_candidate

BARE: Final = "bare"
_WARMUP: Final = 5
_CALLS: Final = 50  # in one reading
_SEED: Final = 5


@dataclass(frozen=True)
class CallCost:
    """The CPU time of calls of one op.

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
    """Time calls of an op beside a bare `torch.autograd.Function`, launches stubbed, in CPU time of the process.

    The bare one calls the same registered ops (`torch.ops.fuselayers`) with arguments that are known beforehand, saves
    its inputs and returns gradients that are ready. It checks nothing and chooses nothing.

    Args:
        title: of the op and its options.
        case: the op, on small tensors.
        readings: how many of each candidate and span, in turns.
        device: where the tensors are: a GPU, or the CPU in a process that was started with TRITON_INTERPRET=1.

    Raises:
        BackendUnavailableError: the op's kernels do not run on the device.
    """
    seeded = {**case.options, "seed": torch.tensor(_SEED, device=device)} if case.options.get("p") else case.options

    def with_kernels(*tensors: Tensor, **named: Tensor) -> Any:
        return case.op(*tensors, **{**named, **seeded}, backend="triton")

    own = op_candidate(OURS, OpCase(with_kernels, case.plain, case.tensors, {}), with_kernels)
    with stubbed_launches():
        candidates = [own, _bare(own)]
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
                started = time.process_time()
                for _ in range(_CALLS):
                    call()
                seconds.append((time.process_time() - started) / _CALLS)
    return cost


def _with_backward(candidate: Candidate) -> Callable[[], Sequence[Tensor]]:
    weights = [torch.ones_like(one) for one in candidate.call()]
    return lambda: torch.autograd.grad(candidate.call(), candidate.leaves, weights, allow_unused=True)


def _bare(own: Candidate) -> Candidate:
    with _Recorder() as forward:
        own.call()
    run = _with_backward(own)
    with _Recorder() as both:
        gradients = run()

    def call() -> tuple[Tensor, ...]:
        made = _Bare.apply(forward.calls, both.calls[len(forward.calls) :], gradients, *own.leaves)  # type: ignore[no-untyped-call]
        return made if isinstance(made, tuple) else (made,)

    num_results = len(own.call())
    return Candidate(BARE, lambda: call()[:num_results], own.leaves)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the calls of this library's registered ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fuselayers":
            self.calls.append(functools.partial(func, *args, **kwargs or {}))
        return func(*args, **kwargs or {})


class _Bare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        now: Sequence[Callable[[], Any]],
        later: Sequence[Callable[[], Any]],
        gradients: Sequence[Tensor | None],
        *leaves: Tensor,
    ) -> Any:
        ctx.save_for_backward(*leaves)
        ctx.later, ctx.gradients = later, gradients
        results = [one() for one in now]
        return tuple(results[-1]) if isinstance(results[-1], (tuple, list)) else results[-1]

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        for one in ctx.later:
            one()
        return (None, None, None, *ctx.gradients)
