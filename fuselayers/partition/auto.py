"""auto -- which backend is fastest for a graph: measured once on copies of the caller's inputs, remembered on disk.

A graph begins with the first backend that works. When its calls have taken as long as `warm_up` says, every candidate
runs on copies of the inputs of that call, forward and backward, in turns and in random order:

    the backends     each that works for the graph's device; on a GPU "inductor" has the formulas of this library's ops,
                     and "triton" their kernels
    "plain"          the graph as Dynamo traced it, op by op under plain autograd

The fastest serves from then on, behind Dynamo's guards. Later processes read the times from `auto_file` and compile
nothing else. With a backward, a tie of two percent goes to a backend, which saves fewer bytes; without, to "plain".

Nothing is measured, and the first backend stays, where candidates would give different results: with a budget or a
partitioner of the user's own, and in a graph that draws torch's own random numbers. The same holds for a graph with a
checkpoint in it, for a graph that writes to inputs that share memory, for tensor subclasses, and where `may_measure`
forbids it.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.fx as fx
from torch import Tensor, nn

from .._torch.dispatch import FakeTensor, as_a_compiler, saved_tensors_hooks_are_active
from .._torch.guards import torch_compile
from .._torch.tracing import copy_of
from ..errors import BackendUnavailableError
from .backends import (
    CANDIDATES,
    PLAIN,
    compile_chain,
    device_types_of,
    main_device,
    why_unavailable,
)
from .compilers import holds_own_ops
from .partitioners import Partitioner, SavePolicy, partitioner
from .report import GraphReport, ServedGraph, cache_key
from .side_effects import Modes, holds_checkpoints, sharing_memory, side_effects, switches_modes
from .timer import Step, median_seconds, time_in_turns
from .timings import has_choice, may_measure, remember, remembered, warm_up_seconds

_TIE: Final = 1.02
# The limits of one measurement; a round is one call of each candidate.
_ROUNDS: Final = 31
_SECONDS: Final = 2.0

_log = logging.getLogger("fuselayers")
_Run = Callable[..., Any]


def fastest(seconds: Mapping[str, float | None]) -> str:
    """Return the first candidate that is as fast as the fastest, to two percent; None marks one that does not work.

    >>> fastest({"inductor": 1.01, "eager": 1.5, "plain": 1.0})
    'inductor'
    >>> fastest({"inductor": 1.3, "eager": None, "plain": 1.0})
    'plain'
    """
    known = {name: one for name, one in seconds.items() if one is not None}
    return next(name for name, one in known.items() if one <= _TIE * min(known.values()))


def compile_auto(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    chain: Sequence[str],
    report: GraphReport,
    **options: Any,
) -> tuple[_Run, ServedGraph]:
    """Compile a graph with the candidate that was fastest before, or with the first backend of `chain` to be measured.

    The graph is used up, and its report completed. `options` are `partition` and `torch_random`, as in `fuse`.

    Raises:
        BackendUnavailableError: no backend of the chain works.
    """
    measurable = has_choice() and _candidates_are_interchangeable(options["partition"], example_inputs)
    if not measurable or holds_checkpoints(graph_module):
        return compile_chain(graph_module, example_inputs, chain=chain, report=report, **options)
    known = remembered(cache_key(report), main_device(example_inputs)) if not _size_indices(graph_module) else None
    if known and known.keys() == {*_candidates_for(graph_module, example_inputs), PLAIN}:
        report = _measured_report(report, known, "measured before")
        if report.served_by == PLAIN:
            return _as_traced(graph_module), ServedGraph(report)
        chain = tuple(dict.fromkeys((report.served_by, *chain)))
        return compile_chain(graph_module, example_inputs, chain=chain, report=report, **options)
    # A chain with more than one backend compiles copies of the graph, but for the last, which does not change it.
    run, served = compile_chain(graph_module, example_inputs, chain=chain, report=report, **options)
    served.report = replace(served.report, reason=f"{served.report.reason}; not measured yet")
    return _Undecided(graph_module, run, served, options, sharing_memory(example_inputs)), served


def compile_pinned(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    choices: Mapping[str, str],
    fallback: Sequence[str],
    report: GraphReport,
    **options: Any,
) -> tuple[_Run, ServedGraph]:
    """Compile a graph with the backend that `choices`, of `pinned_choices`, pins for it, or else with the fallbacks.

    The other arguments and the error are those of `compile_auto`.
    """
    pinned = choices.get(report.identity, choices[""])
    report = replace(report, served_by=pinned, reason="pinned")
    if pinned == PLAIN and not holds_checkpoints(graph_module):
        return _as_traced(graph_module), ServedGraph(report)
    if pinned == PLAIN:
        report = replace(report, reason="pinned as plain, but it holds a checkpoint")
    chain = [name for name in dict.fromkeys((pinned, *fallback)) if name != PLAIN] or ["eager"]
    return compile_chain(graph_module, example_inputs, chain=chain, report=report, **options)


def seconds_of(
    candidates: Mapping[str, _Run], inputs: Sequence[Any], *, overwritten: frozenset[int] = frozenset()
) -> dict[str, float]:
    """Return the median seconds of one call of each candidate, with its backward if its result needs gradients.

    Args:
        candidates: functions of the inputs, which return a tensor or a tuple.
        inputs: tensors, which stay as they are, and other values.
        overwritten: positions of the inputs that a candidate writes to.
    """
    gpu = next((one.device for one in inputs if isinstance(one, Tensor) and one.is_cuda), None)
    kind = main_device(inputs)

    def call(run: _Run, prepared: tuple[list[Any], list[Tensor]]) -> None:
        copies, leaves = prepared
        outputs = run(*copies)
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        reached = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
        reached = [one for one in reached if not any(one is other for other in copies)]
        if reached:
            torch.autograd.grad(reached, leaves, [torch.ones_like(one) for one in reached], allow_unused=True)

    # Autocast would cache a cast of each call's copies until the user's own `with` ends.
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    uncached = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
    on_gpu = contextlib.nullcontext() if gpu is None else torch.cuda.device(gpu)
    # The seeds that a graph draws are drawn again afterwards: dropout's masks do not depend on measuring.
    with on_gpu, torch.random.fork_rng(devices=[] if gpu is None else [gpu]), uncached:
        modes = Modes()

        def prepare() -> tuple[list[Any], list[Tensor]]:
            modes.restore()  # a graph may leave gradients off
            return copies_of(inputs, overwritten)

        steps = {name: Step(functools.partial(call, run), prepare) for name, run in candidates.items()}
        times = time_in_turns(steps, device=gpu or torch.device(kind), rounds=_ROUNDS, seconds=_SECONDS)
    return median_seconds(times)


def copies_of(inputs: Sequence[Any], overwritten: frozenset[int] = frozenset()) -> tuple[list[Any], list[Tensor]]:
    """Return inputs to call a candidate with, and the leaves among them. They share memory where nobody writes."""
    copies, leaves = [], []
    for index, one in enumerate(inputs):
        if not isinstance(one, Tensor):
            copies.append(one)
            continue
        copy = one.detach().clone() if index in overwritten else one.detach()
        if one.requires_grad:
            leaves.append(copy.requires_grad_())
        # A leaf cannot be overwritten.
        copies.append(copy.clone() if index in overwritten and one.requires_grad else copy)
    return copies, leaves


@functools.cache
def guard_seconds() -> float | None:
    """Return about how long Dynamo takes before a graph runs, or None where it may not compile."""
    # 40 tensors take 2 us longer than one (15 us, Xeon).
    tensor = torch.zeros(2, device="cpu")
    try:
        compiled = torch_compile(torch.neg, backend=lambda graph_module, _: graph_module.forward, recompile_limit=64)
        steps = {"guarded": Step(lambda _: compiled(tensor)), "bare": Step(lambda _: torch.neg(tensor))}
        seconds = median_seconds(time_in_turns(steps, device=torch.device("cpu"), rounds=101, seconds=0.5))
    except Exception as error:
        _log.info("the time of Dynamo's guards is not known: %s", error)
        return None
    return max(seconds["guarded"] - seconds["bare"], 0.0)


def _as_traced(graph_module: fx.GraphModule) -> _Run:
    """Return a function that runs a graph op by op, and restores the modes if an op raises."""
    if not switches_modes(graph_module):
        return graph_module.forward

    def run(*inputs: Any) -> Any:
        modes = Modes()
        try:
            return graph_module(*inputs)
        except BaseException:
            modes.restore()
            raise

    return run


class _Undecided:
    """Runs a graph with the first backend until it is time to measure, and with the fastest candidate from then on.

    A graph with symbolic sizes is measured once for each power of two that they reach, and only against "plain":
    another backend would compile it for the sizes of that moment.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        run: _Run,
        served: ServedGraph,
        options: Mapping[str, Any],
        shared_at_first: frozenset[int],
    ) -> None:
        self._graph_module = graph_module
        self._first_name, self._first = served.report.served_by, run
        self._served = served
        self._options = options
        self._shared_at_first = shared_at_first  # the inputs that shared memory when the first backend compiled
        self._size_indices = _size_indices(graph_module)
        self._chosen: dict[tuple[int, ...], _Run] = {}
        self._spent: dict[tuple[int, ...], float] = {}
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        sizes = tuple(int(inputs[index]).bit_length() for index in self._size_indices) if self._size_indices else ()
        if sizes not in self._chosen:
            self._try_to_choose(sizes, inputs)
        if sizes in self._chosen:
            return self._chosen[sizes](*inputs)
        started = time.perf_counter()
        result = self._first(*inputs)
        self._spent[sizes] = self._spent.get(sizes, 0.0) + time.perf_counter() - started
        return result

    def _try_to_choose(self, sizes: tuple[int, ...], inputs: Sequence[Any]) -> None:
        if saved_tensors_hooks_are_active():
            # A checkpoint compares what forward saves with what its second run saves: both need the same backend.
            self._stay(sizes, "since it runs under hooks for saved tensors, as in a checkpoint")
            return
        if not has_choice() or not self._lock.acquire(blocking=False):  # another thread is measuring
            return
        try:
            if sizes in self._chosen:  # another thread was faster
                return
            key, device_type = cache_key(self._served.report, sizes), main_device(inputs)
            # Without symbolic sizes, `compile_auto` has looked already.
            known = remembered(key, device_type) if sizes and sizes not in self._spent else None
            if known and known.keys() == {self._first_name, PLAIN}:
                self._choose(sizes, known, {}, "measured before")
            elif self._spent.get(sizes, 0.0) >= warm_up_seconds() and may_measure():
                self._measure(sizes, inputs, key, device_type)
        finally:
            self._lock.release()

    def _measure(self, sizes: tuple[int, ...], inputs: Sequence[Any], key: str, device_type: str) -> None:
        # An error here is an error on copies, most likely for want of memory: the call itself may succeed.
        modes = Modes()
        try:
            effects = side_effects(self._graph_module, inputs)
            if effects.draws:
                self._stay(sizes, "since the graph draws torch's own random numbers")
                return
            if effects.overwritten & (self._shared_at_first | sharing_memory(inputs)):
                # A backend writes to one of them through another, which is no copy.
                self._stay(sizes, "since it writes to inputs that share memory")
                return
            names = [self._first_name] if sizes else _candidates_for(self._graph_module, inputs)
            candidates = self._candidates(names, inputs)
            measured = seconds_of(candidates, inputs, overwritten=effects.overwritten)
        except Exception as error:
            _log.warning("%s was not measured: %s: %s", self._served.report.name, type(error).__name__, error)
            self._stay(sizes, f"since measuring failed with {type(error).__name__}, see the log")
            return
        finally:
            modes.restore()
        has_backward = torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in inputs)
        order = (*names, PLAIN) if has_backward else (PLAIN, *names)  # in which ties are settled
        seconds = {name: measured.get(name) for name in order}
        remember(key, seconds, device_type)
        self._choose(sizes, seconds, candidates, "measured")

    def _candidates(self, names: Sequence[str], inputs: Sequence[Any]) -> dict[str, _Run]:
        candidates: dict[str, _Run] = {}
        for name in names:
            if name == self._first_name:
                candidates[name] = self._first
                continue
            try:
                with as_a_compiler():
                    candidates[name], _ = compile_chain(
                        copy_of(self._graph_module),
                        copies_of(inputs)[0],
                        chain=(name,),
                        report=self._served.report,
                        **self._options,
                    )
            except BackendUnavailableError as error:
                _log.info("%s is no candidate: %s", name, error)
        return {**candidates, PLAIN: _as_traced(self._graph_module)}

    def _choose(
        self, sizes: tuple[int, ...], seconds: Mapping[str, float | None], candidates: Mapping[str, _Run], reason: str
    ) -> None:
        report = _measured_report(self._served.report, seconds, reason)
        known = {self._first_name: self._first, PLAIN: _as_traced(self._graph_module), **candidates}
        best = known[report.served_by]
        if self._chosen.setdefault(sizes, best) is not best:
            return  # another thread met a checkpoint meanwhile, and stays with the first backend
        self._served.report = report
        if not sizes:  # nothing is left to decide: free the other candidates
            self._first, self._graph_module = best, fx.GraphModule({}, fx.Graph())

    def _stay(self, sizes: tuple[int, ...], why: str) -> None:
        self._chosen.setdefault(sizes, self._first)
        self._served.report = replace(self._served.report, reason=f"the first that works; not measured, {why}")


def _measured_report(report: GraphReport, seconds: Mapping[str, float | None], reason: str) -> GraphReport:
    best = fastest(seconds)
    known = {name: one for name, one in seconds.items() if one is not None}
    reason = f"not worth fusing, {reason}" if best == PLAIN else reason
    return replace(report, served_by=best, reason=reason, seconds=known)


def _candidates_for(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> list[str]:
    """The backends to measure, in the order in which ties are settled."""
    device_types, has_own_ops = device_types_of(inputs), holds_own_ops(graph_module)
    names = [name for name in CANDIDATES if name != "triton" or has_own_ops]
    return [name for name in names if why_unavailable(name, device_types) is None]


def _candidates_are_interchangeable(partition: str | Partitioner, example_inputs: Sequence[Any]) -> bool:
    """True without a limit on bytes, a partitioner of the user's own, and tensor subclasses."""
    own = partitioner(partition)
    kinds = {type(one) for one in example_inputs if isinstance(one, Tensor)}
    return isinstance(own, SavePolicy) and own.limit is None and kinds <= {Tensor, nn.Parameter, FakeTensor}


def _size_indices(graph_module: fx.GraphModule) -> tuple[int, ...]:
    """The positions of a graph's inputs that are sizes."""
    inputs = graph_module.graph.find_nodes(op="placeholder")
    return tuple(
        index for index, node in enumerate(inputs) if isinstance(node.meta.get("example_value"), torch.SymInt | int)
    )
