"""auto -- which backend serves a graph best: measured once, on the caller's own inputs, and remembered on disk.

A graph begins with the first backend that works. When its calls have taken as long as `patience` says, every candidate
runs on copies of the inputs of that call, forward and backward, in turns and in random order:

    the backends     each that works for the graph's device
    "unfused"        the graph as it was traced, op by op under plain autograd

The winner serves from then on, in this process and, by what `timings` keeps, in later ones, where nothing else is
compiled then. Ties of two percent go, with a backward, to a fused form, which keeps fewer bytes for it, and without one
to the function as it is.

Where a candidate would not give what was asked for, nothing is measured and the first backend stays: fused forms alone
keep a budget of bytes or a user's own partitioner, and each candidate draws torch's own random numbers in its own way.
Nor is anything measured where `timings.may_measure` says so, or on tensor subclasses.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx
from torch import Tensor, nn

from .._torch.dispatch import FakeTensor, as_a_compiler, saved_tensors_hooks_are_active
from .._torch.tracing import copy_of
from .backends import (
    CANDIDATES,
    UNFUSED,
    BackendUnavailableError,
    compile_chain,
    device_types_of,
    main_device,
    why_unavailable,
)
from .measure import behind_guards, copies_of, seconds_of
from .modes import Modes, holds_checkpoints, switches_modes
from .partitioners import Partitioner, SavePolicy, partitioner
from .report import ServedGraph, describe_graph, label_of
from .side_effects import side_effects
from .timings import has_choice, may_measure, patience_in_seconds, remember, remembered

__all__ = ["Runs", "best_of", "compile_auto", "compile_frozen"]

_TIE: Final = 1.02

_log = logging.getLogger("fuselayers")
_Run = Callable[..., Any]


class Runs:
    """Counts a function's graphs, and how often they ran, so that one of which none is fused can be called directly.

    Attributes:
        fused: runs through a backend.
        unfused: runs of graphs as they were traced.
        open: graphs that are fused, or that may come to be.
    """

    def __init__(self) -> None:
        self.fused = 0
        self.unfused = 0
        self.open = 0


def best_of(seconds: Mapping[str, float | None]) -> str:
    """Return the candidate to take: the first that is as fast as the fastest, to two percent.

    None are the seconds of one that does not work.

    >>> best_of({"inductor": 1.01, "eager": 1.5, "unfused": 1.0})
    'inductor'
    >>> best_of({"inductor": 1.3, "eager": 1.5, "unfused": 1.0})
    'unfused'
    """
    taken = {name: one for name, one in seconds.items() if one is not None}
    return next(name for name, one in taken.items() if one <= _TIE * min(taken.values()))


def compile_auto(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    name: str,
    chain: Sequence[str],
    partition: str | Partitioner,
    torch_random: bool,
    runs: Runs,
) -> tuple[_Run, ServedGraph]:
    """Compile a graph with what was measured to be best before, or so that it will be measured.

    Args:
        graph_module: a graph of Dynamo's; it is used up.
        example_inputs: what it will be called with first.
        name: of the function, for people.
        chain: the backends to begin with, in order.
        partition: what to save.
        torch_random: as in `fuse`.
        runs: what counts the runs of all graphs of the function.

    Raises:
        BackendUnavailableError: no backend of the chain works.
    """
    options: dict[str, Any] = {"partition": partition, "torch_random": torch_random}
    report = describe_graph(graph_module, name=name, **options)
    devices = device_types_of(example_inputs)
    if not (has_choice() and _keeps_what_was_asked(partition, example_inputs)) or holds_checkpoints(graph_module):
        run, served = compile_chain(graph_module, example_inputs, chain=chain, report=report, **options)
        runs.open += 1
        return _Fused(run, runs), served
    known = not _size_places(graph_module) and remembered(label_of(report, ()), main_device(example_inputs))
    if known and known.keys() == {*_candidates_on(devices), UNFUSED}:
        best = best_of(known)
        told = {name: one for name, one in known.items() if one is not None}
        report = replace(report, served_by=best, reason="measured before", seconds=MappingProxyType(told))
        if best == UNFUSED:
            return _Unfused(graph_module, runs), ServedGraph(report)
        rest = [other for other in chain if other != best]
        run, served = compile_chain(graph_module, example_inputs, chain=(best, *rest), report=report, **options)
        runs.open += 1
        return _Fused(run, runs), served
    # A chain with more than one backend leaves the graph as it is, but for the last, which means the same by it.
    run, served = compile_chain(graph_module, example_inputs, chain=chain, report=report, **options)
    served.report = replace(served.report, reason=f"{served.report.reason}; not measured yet")
    runs.open += 1
    return _Undecided(graph_module, run, served, options=options, runs=runs), served


def compile_frozen(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    name: str,
    choices: Mapping[str, str],
    fallback: Sequence[str],
    partition: str | Partitioner,
    torch_random: bool,
    runs: Runs,
) -> tuple[_Run, ServedGraph]:
    """Compile a graph with what a frozen choice says for it; the others as `compile_auto` has them.

    Args:
        choices: as `frozen_choices` gives them.
        fallback: the backends to take, in order, where the one of the choice does not work.

    Raises:
        BackendUnavailableError: no backend of the chain works.
    """
    options: dict[str, Any] = {"partition": partition, "torch_random": torch_random}
    report = describe_graph(graph_module, name=name, **options)
    chosen = choices.get(report.identity, choices[""])
    report = replace(report, served_by=chosen, reason="frozen")
    if chosen == UNFUSED and holds_checkpoints(graph_module):
        report = replace(report, reason="frozen as unfused, but it holds a checkpoint")
    elif chosen == UNFUSED:
        return _Unfused(graph_module, runs), ServedGraph(report)
    chain = [name for name in dict.fromkeys((chosen, *fallback)) if name != UNFUSED] or ["eager"]
    run, served = compile_chain(graph_module, example_inputs, chain=chain, report=report, **options)
    runs.open += 1
    return _Fused(run, runs), served


class _Unfused:
    """Runs a graph as it was traced."""

    def __init__(self, graph_module: fx.GraphModule, runs: Runs) -> None:
        self._run, self._runs = graph_module, runs
        self._switches_modes = switches_modes(graph_module)

    def __call__(self, *inputs: Any) -> Any:
        self._runs.unfused += 1
        if not self._switches_modes:
            return self._run(*inputs)
        modes = Modes()
        try:
            return self._run(*inputs)
        except BaseException:
            modes.restore()
            raise


class _Fused:
    """Runs what a backend compiled."""

    def __init__(self, run: _Run, runs: Runs) -> None:
        self._run, self._runs = run, runs

    def __call__(self, *inputs: Any) -> Any:
        self._runs.fused += 1
        return self._run(*inputs)


class _Undecided:
    """Runs a graph with the backend it began with, until it is time to measure; from then on with the best.

    A graph with symbolic sizes is measured once for each power of two that they reach, against "unfused" alone: what
    is compiled later is compiled for the sizes of that moment.
    """

    def __init__(
        self, graph_module: fx.GraphModule, run: _Run, served: ServedGraph, *, options: dict[str, Any], runs: Runs
    ) -> None:
        self._graph_module = graph_module
        self._first: _Run = _Fused(run, runs)
        self._served = served
        self._options = options
        self._runs = runs
        self._candidates: dict[str, _Run] = {}
        self._begun_with = served.report.served_by
        self._size_places = _size_places(graph_module)
        self._decided: dict[tuple[int, ...], _Run] = {}
        self._spent: dict[tuple[int, ...], float] = {}
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        sizes = tuple(int(inputs[place]).bit_length() for place in self._size_places)
        run = self._decided.get(sizes)
        if run is not None:
            return run(*inputs)
        self._consider(sizes, inputs)
        started = time.perf_counter()
        result = self._decided.get(sizes, self._first)(*inputs)
        self._spent[sizes] = self._spent.get(sizes, 0.0) + time.perf_counter() - started
        return result

    def _consider(self, sizes: tuple[int, ...], inputs: Sequence[Any]) -> None:
        """Decide, if it can be decided now."""
        if saved_tensors_hooks_are_active():
            # A checkpoint compares what a forward saves with what it saves when it runs again: no change in between.
            self._stay(sizes, "since it runs under hooks for saved tensors, as in a checkpoint")
            return
        if not has_choice() or not self._lock.acquire(blocking=False):  # another thread is at it
            return
        try:
            if sizes in self._decided:  # by another thread meanwhile, which let go of what there was to measure
                return
            label = label_of(self._served.report, sizes)
            device_type = main_device(inputs)
            seconds = remembered(label, device_type) if sizes else None
            if seconds is None or seconds.keys() != {self._begun_with, UNFUSED}:
                if self._spent.get(sizes, 0.0) < patience_in_seconds() or not may_measure():
                    return
                seconds = self._measured(sizes, inputs)
                if seconds is None:
                    return
                remember(label, seconds, device_type)
            self._take(sizes, seconds)
        finally:
            self._lock.release()

    def _measured(self, sizes: tuple[int, ...], inputs: Sequence[Any]) -> Mapping[str, float | None] | None:
        """The seconds of every candidate, or None if nothing can be measured and the first backend stays."""
        # What goes wrong here goes wrong on copies, most likely for want of memory: the call itself may be fine.
        modes = Modes()
        try:
            effects = side_effects(self._graph_module, inputs)
            if effects.draws:
                self._stay(sizes, "since the graph draws torch's own random numbers")
                return None
            self._candidates = self._compiled(sizes, inputs)
            # What is unfused will be called without them.
            timed = {name: run if name == UNFUSED else behind_guards(run) for name, run in self._candidates.items()}
            seconds = seconds_of(timed, inputs, plain=UNFUSED, overwritten=effects.overwritten)
            asked = [self._begun_with] if sizes else _candidates_on(device_types_of(inputs))
            # Where nothing is kept for a backward, a fused form has to be faster to be worth it.
            trains = torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in inputs)
            return {name: seconds.get(name) for name in ((*asked, UNFUSED) if trains else (UNFUSED, *asked))}
        except Exception as error:
            said = str(error).strip().splitlines()
            self._stay(sizes, f"since measuring failed with {type(error).__name__}: {said[0] if said else ''}")
            return None
        finally:
            modes.restore()

    def _compiled(self, sizes: tuple[int, ...], inputs: Sequence[Any]) -> dict[str, _Run]:
        """Every candidate, in the order in which ties are broken."""
        candidates: dict[str, _Run] = {}
        for name in _candidates_on(device_types_of(inputs)):
            if name == self._begun_with:
                candidates[name] = self._first
            elif not sizes:
                try:
                    with as_a_compiler():
                        run, _ = compile_chain(
                            copy_of(self._graph_module),
                            copies_of(inputs)[0],
                            chain=(name,),
                            report=self._served.report,
                            **self._options,
                        )
                except BackendUnavailableError as error:
                    _log.info("%s is no candidate: %s", name, error)
                else:
                    candidates[name] = _Fused(run, self._runs)
        candidates[UNFUSED] = _Unfused(self._graph_module, self._runs)
        return candidates

    def _take(self, sizes: tuple[int, ...], seconds: Mapping[str, float | None]) -> None:
        best = best_of(seconds)
        made: dict[str, _Run] = {
            self._begun_with: self._first,
            UNFUSED: _Unfused(self._graph_module, self._runs),
            **self._candidates,
        }
        self._candidates = {}
        # Another thread may have met a checkpoint meanwhile, and settled it.
        if self._decided.setdefault(sizes, made[best]) is not made[best]:
            return
        told = {name: one for name, one in seconds.items() if one is not None}
        self._served.report = replace(
            self._served.report, served_by=best, reason="measured", seconds=MappingProxyType(told)
        )
        if not sizes:  # nothing is left to decide: what lost is let go
            self._first = made[best]
            if best == UNFUSED:
                self._runs.open -= 1
            else:
                self._graph_module = fx.GraphModule({}, fx.Graph())

    def _stay(self, sizes: tuple[int, ...], why: str) -> None:
        self._candidates = {}
        self._decided.setdefault(sizes, self._first)
        self._served.report = replace(self._served.report, reason=f"the first that works; not measured, {why}")


def _candidates_on(device_types: set[str]) -> list[str]:
    """The backends to measure, in the order in which ties are broken."""
    return [name for name in CANDIDATES if why_unavailable(name, device_types) is None]


def _keeps_what_was_asked(partition: str | Partitioner, example_inputs: Sequence[Any]) -> bool:
    """Whether any candidate would do: no limit on bytes, no partitioner of the user's own, no tensor subclasses."""
    own = partitioner(partition)
    kinds = {type(one) for one in example_inputs if isinstance(one, Tensor)}
    return isinstance(own, SavePolicy) and own.limit is None and kinds <= {Tensor, nn.Parameter, FakeTensor}


def _size_places(graph_module: fx.GraphModule) -> tuple[int, ...]:
    """Which inputs of a graph are sizes."""
    inputs = graph_module.graph.find_nodes(op="placeholder")
    return tuple(
        place for place, node in enumerate(inputs) if isinstance(node.meta.get("example_value"), torch.SymInt | int)
    )
