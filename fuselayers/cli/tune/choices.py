"""Which candidate serves a fused function best: measured as "auto" measures, then timed as it will be called."""

import inspect
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ...configs import build, compose
from ...ops.forms.choice import faster_form
from ...partition import fuse, patience
from ...partition.auto import best_of
from ...partition.backends import AUTO_ORDER, UNFUSED, why_unavailable
from ...partition.report import read_label
from ...partition.timings import measured_anew
from ..bench.cases import OPS, OpCase, Settings, op_case
from ..machine import synchronize

__all__ = ["Ratio", "Row", "frozen", "tune_model", "tune_ops"]

_TRAINING: Final = "training"
_FORWARD: Final = "forward"
_CALLS_TO_DECIDE: Final = 3
# Of turns of a step and eager's. How many does not hang on what they show: who stops at a good reading, and goes on at
# a bad one, reads too much.
_ENOUGH_SECONDS: Final = 3.0
# 401 left the ratio of a kernel of 0.4 ms uncertain by a percent (EPYC, 2 cores); 11 that of 0.8 s by four.
_ENOUGH_ROUNDS: Final = 31
_MOST_ROUNDS: Final = 2001
# For steps of many seconds.
_MOST_SECONDS: Final = 60.0
_FEWEST_ROUNDS: Final = 11
# Below this a choice is no gain over eager.
_WORTH_IT: Final = 0.98

_Step = Callable[[], None]


@dataclass(frozen=True)
class Ratio:
    """How often one time contains another.

    Attributes:
        median: of what was measured, a number for each turn.
        low: where the true median's interval of at least 95 % begins, if turns do not hang on each other.
        high: where it ends.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} x ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Row:
    """What was found for one function in one use.

    Attributes:
        function: with the inputs that it was called with.
        use: "training", which is forward and backward, or "forward".
        seconds: of each candidate.
        chosen: the candidate that will serve.
        ratio: eager's time divided by that of the function as it will be called; None for a part of a whole.
        identity: of the graph, "" for what is no single graph.
    """

    function: str
    use: str
    seconds: Mapping[str, float]
    chosen: str
    ratio: Ratio | None
    identity: str


def frozen(rows: Sequence[Row], device_type: str = "cpu") -> str:
    """Return the backend that a config names to have these choices without measuring.

    A graph that was not measured, as one that draws torch's own random numbers, keeps what "auto" begins with.

    >>> rows = [Row("one", "training", {}, name, None, f"0a0b0c0{place}") for place, name in enumerate(["eager"])]
    >>> frozen(rows).partition("+")[2]
    '0a0b0c00:eager'
    """
    chosen = {row.identity: row.chosen for row in rows if row.identity}
    first = next(name for name in AUTO_ORDER if why_unavailable(name, {device_type}) is None)
    return "+".join([f"frozen:{first}", *(f"{graph}:{name}" for graph, name in chosen.items() if name != first)])


def tune_model(overrides: Sequence[str], *, batch_size: int | None, device: torch.device, keep: bool) -> list[Row]:
    """Choose for every fused part of a model, in training and forward alone, and time the whole.

    Args:
        overrides: of the config.
        batch_size: examples at once; None is the config's `train.batch_size`.
        device: where the model is.
        keep: whether the choice outlives the process.

    Raises:
        ValueError: an override that does not fit, a model in which nothing is fused, or one that does not say what it
            is called with.
    """
    config = compose("gpt_nano", overrides)
    if config.fusion.scope == "none":
        raise ValueError("nothing in this model is fused, so there is nothing to choose; take fusion=auto")
    plain: Any = build(replace(config, fusion=replace(config.fusion, scope="none"))).to(device)
    if not hasattr(plain, "example_inputs"):
        raise ValueError(
            f"model {config.model.name!r} does not say what it is called with; give {type(plain).__name__} a method "
            'example_inputs(batch_size=1, device="meta")'
        )
    inputs = plain.example_inputs(batch_size or config.train.batch_size, device=device)

    def steps(use: str) -> tuple[_Step, _Step]:
        model = build(replace(config, fusion=replace(config.fusion, backend="auto"))).to(device)
        model.load_state_dict(plain.state_dict())
        for one in (plain, model):
            one.train(use == _TRAINING)
        eager, auto = (_step(one, inputs, one.parameters(), use) for one in (plain, model))
        return eager, auto

    rows = []
    for use in (_TRAINING, _FORWARD):
        whole, parts = _tuned(f"model {config.model.name}", use, steps, device=device, keep=keep)
        rows += [*parts, whole]
    return rows


def tune_ops(
    shapes: Sequence[tuple[int, ...]], *, dtype: torch.dtype, dropout: float, device: torch.device, keep: bool
) -> list[Row]:
    """Choose for every op of the library, fused by itself, in training and forward alone.

    Raises:
        ValueError: a shape or a dropout that no op takes.
    """
    rows = []
    for shape in shapes:
        for name in OPS:
            case = op_case(name, Settings(shape, dropout=dropout, activation="gelu", dtype=dtype, device=device))
            for use in (_TRAINING, _FORWARD):
                size = "x".join(map(str, shape))
                whole, parts = _tuned(f"{name} {size}", use, partial(_op_steps, case), device=device, keep=keep)
                graphs = [row for row in parts if row.identity]
                if len(graphs) == 1:
                    whole = replace(whole, seconds=graphs[0].seconds, chosen=graphs[0].chosen)
                rows.append(whole)
    return rows


def _op_steps(case: OpCase, use: str) -> tuple[_Step, _Step]:
    """An op's formula, and the op through `fuse`."""
    torch.compiler.reset()  # every shape shall be a graph of its own
    fused = fuse(case.op, static_argnames=tuple(case.options))
    leaves = [tensor for tensor in case.tensors.values() if tensor.requires_grad]
    formula = {} if "backend" not in inspect.signature(case.op).parameters else {"backend": "eager"}

    def eager() -> Any:
        return case.op(**case.tensors, **case.options, **formula)

    def auto() -> Any:
        return fused(**case.tensors, **case.options)

    return _step(eager, (), leaves, use), _step(auto, (), leaves, use)


def _step(call: Callable[..., Any], inputs: Sequence[Any], leaves: Iterable[Tensor], use: str) -> _Step:
    """One forward, with its backward in training."""
    wanted = tuple(leaves)

    def step() -> None:
        with torch.set_grad_enabled(use == _TRAINING):
            outputs = call(*inputs)
        if use == _TRAINING:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            reached = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
            torch.autograd.grad(reached, wanted, [torch.ones_like(one) for one in reached], allow_unused=True)

    return step


def _tuned(
    name: str, use: str, steps: Callable[[str], tuple[_Step, _Step]], *, device: torch.device, keep: bool
) -> tuple[Row, list[Row]]:
    """Let "auto" measure, and time what it chose as it will be called; returns the whole and its parts.

    Args:
        name: of the whole.
        use: "training" or "forward".
        steps: makes the eager step, and one through `fuse` with nothing compiled yet.
        device: where they run.
        keep: whether the choice outlives the process.
    """
    with patience(0), measured_anew(device.type, keep=keep) as found:
        while True:
            eager, auto = steps(use)
            for _ in range(_CALLS_TO_DECIDE):
                auto()
            ratio = _in_turns(eager, auto, device)
            parts = [_row(label, seconds) for label, seconds in found.items()]
            graphs = [label for label, seconds in found.items() if UNFUSED in seconds]
            if ratio.median >= _WORTH_IT or all(best_of(found[graph]) == UNFUSED for graph in graphs):
                break
            # What ran well between its neighbours does not as it is called: that decides, and the next is tried. With
            # the time that it gets it loses against the function as it is from now on, so there is an end. Of several
            # graphs nobody knows which it was.
            for graph in graphs:
                plain = found[graph][UNFUSED]
                assert plain is not None  # the others' times were taken beside it
                if len(graphs) == 1:
                    found[graph] = {**found[graph], best_of(found[graph]): plain / ratio.median}
                else:
                    found[graph] = {**dict.fromkeys(found[graph]), UNFUSED: plain}
            torch.compiler.reset()
    chosen = ", ".join(sorted({row.chosen for row in parts})) or "eager"
    return Row(name, use, {}, chosen, ratio=ratio, identity=""), parts


def _row(label: str, found: Mapping[str, float | None]) -> Row:
    known = read_label(label)
    seconds = {name: one for name, one in found.items() if one is not None}
    if known is None:  # an op that is called by itself
        return Row(label, "", seconds, faster_form(found), ratio=None, identity="")
    function, use, identity = known
    return Row(function, use, seconds, best_of(seconds), ratio=None, identity=identity)


def _in_turns(eager: _Step, auto: _Step, device: torch.device) -> Ratio:
    """How often eager's time contains the other's, both called in turns and in random order: what else the machine does
    for a while falls on both of a turn alike."""
    times: dict[_Step, list[float]] = {eager: [], auto: []}
    order = random.Random(0)
    began = time.perf_counter()
    for done in range(_MOST_ROUNDS):
        seconds = time.perf_counter() - began
        if (done >= _ENOUGH_ROUNDS and seconds > _ENOUGH_SECONDS) or (
            done >= _FEWEST_ROUNDS and seconds > _MOST_SECONDS
        ):
            break
        for step in order.sample([eager, auto], 2):
            # Eager's ops shall not change their form; what is fused has made its choice.
            with patience(math.inf if step is eager else 0):
                synchronize(device)
                started = time.perf_counter()
                step()
                synchronize(device)
                times[step].append(time.perf_counter() - started)
    return _ratio([one / other for one, other in zip(times[eager], times[auto], strict=True)])


def _ratio(measured: Sequence[float]) -> Ratio:
    """The median with its interval, for 6 or more values that are spread in any way: how many of n lie below the true
    median is binomial, n / 2 with a deviation of sqrt(n) / 2.

    >>> _ratio([0.5, 0.75, 0.75, 1.0, 1.0, 1.0, 1.0, 1.25, 1.25, 1.75, 9.0])
    Ratio(median=1.0, low=0.75, high=1.75)
    """
    in_order = sorted(measured)
    outside = math.floor((len(in_order) - 1.96 * math.sqrt(len(in_order)) - 1) / 2)
    return Ratio(statistics.median(in_order), in_order[outside], in_order[-1 - outside])
