"""Which candidate serves a fused function best: measured as "auto" measures, and timed as it will be called. Where that
is more than two percent slower than eager, it is chosen again among all, timed so."""

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
from ...ops.forms.choice import faster_form, forget_forms
from ...partition import fuse, patience
from ...partition.auto import best_of
from ...partition.backends import AUTO_ORDER, CANDIDATES, UNFUSED, why_unavailable
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
# Below this a choice counts as slower than eager.
_WORTH_IT: Final = 0.98
# Beside the candidates' names: the choice as it was.
_AS_BEFORE: Final = ""

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
        seconds: of each candidate, as "auto" measures them; of a graph that another candidate serves after a second
            choice, in proportion to what the whole took with each.
        chosen: the candidate that will serve; of a whole all that its graphs have, or "not measured".
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

    A ratio is read once, before another choice is made, or after it: the reading that won is too good, and who reads
    again what reads badly reads too much.

    Args:
        name: of the whole.
        use: "training" or "forward".
        steps: makes the eager step, and one through `fuse` with nothing compiled yet.
        device: where they run.
        keep: whether the choice outlives the process.
    """

    def timed() -> Ratio:
        torch.compiler.reset()  # every shape and every choice shall be a graph of its own
        forget_forms()
        eager, auto = steps(use)
        for _ in range(_CALLS_TO_DECIDE):
            auto()
        return _in_turns(eager, auto, device)

    with patience(0), measured_anew(device.type, keep=keep) as found:
        ratio = timed()
        if ratio.median < _WORTH_IT and _chosen_again(found, timed, use):
            ratio = timed()
        parts = [_row(label, seconds) for label, seconds in found.items()]
    chosen = ", ".join(sorted({row.chosen for row in parts if row.identity})) or "not measured"
    return Row(name, use, {}, chosen, ratio=ratio, identity=""), parts


def _chosen_again(found: dict[str, Mapping[str, float | None]], timed: Callable[[], Ratio], use: str) -> bool:
    """Let each candidate serve all graphs, and take the best; returns whether that is another choice.

    What ran well between its neighbours does not always as it is called, nor the other way round. Of several graphs
    nobody knows which it was, so only the whole is timed: with the choice as it was, and with each candidate wherever
    it works. Ties go to the first of these, but none to what is slower than eager where something else is not.

    Args:
        found: the seconds of each candidate for each graph, and of the forms of ops that are called by themselves. Of
            another choice there are only the graphs in it afterwards: what is chosen comes first, and each candidate
            has the plain function's seconds, as measured, divided by the ratio of the whole with it. Where what is
            chosen does not work, a graph stays as it was.
        timed: times the whole, with what `found` says.
        use: "training" or "forward".
    """
    known = dict(found)
    graphs = {label: seconds for label, seconds in known.items() if UNFUSED in seconds}
    if not graphs:
        return False
    before = {label: best_of(seconds) for label, seconds in graphs.items()}
    ratios = {_AS_BEFORE: timed().median}
    # As "auto" settles ties.
    for name in (*CANDIDATES, UNFUSED) if use == _TRAINING else (UNFUSED, *CANDIDATES):
        serving = {label: before[label] if one.get(name) is None else name for label, one in graphs.items()}
        if serving == before:  # also of what works nowhere
            ratios[name] = ratios[_AS_BEFORE]
            continue
        found.update({label: {**dict.fromkeys(one), serving[label]: 1.0} for label, one in graphs.items()})
        ratios[name] = timed().median
    found.clear()
    found.update(known)
    fast = {name: ratio for name, ratio in ratios.items() if ratio >= _WORTH_IT}
    best = best_of({name: 1 / ratio for name, ratio in (fast or ratios).items()})
    if best == _AS_BEFORE:
        return False
    found.clear()
    for label, seconds in graphs.items():
        plain = seconds[UNFUSED]
        assert plain is not None  # the others' times were taken beside it
        shares = {name: None if one is None else plain / ratios[name] for name, one in seconds.items()}
        found[label] = seconds if seconds.get(best) is None else {best: shares[best], **shares}
    return True


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
