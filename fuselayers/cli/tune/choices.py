"""Which candidate serves a fused function best: measured as "auto" measures, and timed as it will be called. Where that
is more than two percent slower than eager, it is chosen again among all, timed so."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ...configs import build, compose
from ...partition import fuse, patience
from ...partition.auto import best_of
from ...partition.backends import AUTO_ORDER, CANDIDATES, UNFUSED, why_unavailable
from ...partition.report import read_label
from ...partition.timings import measured_anew
from ..bench.cases import OPS, OpCase, Settings, op_case
from ..example import example_batch
from .turns import Ratio, Step, in_turns

__all__ = ["Row", "frozen", "tune_model", "tune_ops"]

_TRAINING: Final = "training"
_FORWARD: Final = "forward"
_CALLS_TO_DECIDE: Final = 3
# Below this a choice counts as slower than eager.
_WORTH_IT: Final = 0.98
# Beside the candidates' names: the choice as it was.
_AS_BEFORE: Final = ""


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
        again: whether it was chosen a second time, by what the whole took with each candidate.
    """

    function: str
    use: str
    seconds: Mapping[str, float]
    chosen: str
    ratio: Ratio | None
    identity: str
    again: bool = False


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


def tune_model(
    overrides: Sequence[str],
    *,
    batch_size: int | None,
    device: torch.device,
    keep: bool,
    say: Callable[[Row], object],
) -> list[Row]:
    """Choose for every fused part of a model, in training and forward alone, and time the whole.

    Args:
        overrides: of the config.
        batch_size: examples at once; None is the config's `train.batch_size`.
        device: where the model is.
        keep: whether the choice outlives the process.
        say: is told what was found for each whole, as soon as it is known.

    Raises:
        ValueError: an override that does not fit, a model in which nothing is fused, or one that does not say what it
            is called with.
    """
    config = compose("gpt_nano", overrides)
    if config.fusion.scope == "none":
        raise ValueError("nothing in this model is fused, so there is nothing to choose; take fusion=auto")
    plain: Any = build(replace(config, fusion=replace(config.fusion, scope="none"))).to(device)
    inputs = example_batch(plain, config, (batch_size or config.train.batch_size,), device=device)

    def steps(use: str) -> tuple[Step, Step]:
        model = build(replace(config, fusion=replace(config.fusion, backend="auto"))).to(device)
        model.load_state_dict(plain.state_dict())
        for one in (plain, model):
            one.train(use == _TRAINING)
        eager, auto = (_step(one, inputs, one.parameters(), use) for one in (plain, model))
        return eager, auto

    rows = []
    name = f"model {config.model.name}"
    for use in (_TRAINING, _FORWARD):
        whole, parts = _tuned(name, use, steps, device=device, keep=keep)
        say(whole)
        rows += [*parts, whole]
    return rows


def tune_ops(
    shapes: Sequence[tuple[int, ...]],
    *,
    dtype: torch.dtype,
    dropout: float,
    device: torch.device,
    keep: bool,
    say: Callable[[Row], object],
) -> list[Row]:
    """Choose for every op of the library, fused by itself, in training and forward alone.

    Args:
        shapes: of the ops' first tensors.
        dtype: of all tensors.
        dropout: of the ops that drop.
        device: where they run.
        keep: whether the choice outlives the process.
        say: is told what was found for each whole, as soon as it is known.

    Raises:
        ValueError: a shape or a dropout that no op takes.
    """
    rows = []
    for shape in shapes:
        for op in OPS:
            case = op_case(op, Settings(shape, dropout=dropout, activation="gelu", dtype=dtype, device=device))
            name = f"{op} {'x'.join(map(str, shape))}"
            for use in (_TRAINING, _FORWARD):
                whole, parts = _tuned(name, use, partial(_op_steps, case), device=device, keep=keep)
                graphs = [row for row in parts if row.identity]
                if len(graphs) == 1:
                    whole = replace(whole, seconds=graphs[0].seconds)
                say(whole)
                rows.append(whole)
    return rows


def _op_steps(case: OpCase, use: str) -> tuple[Step, Step]:
    """An op's formula, and the op through `fuse`."""
    fused = fuse(case.op, static_argnames=tuple(case.options))
    leaves = [tensor for tensor in case.tensors.values() if tensor.requires_grad]
    signature = inspect.signature(case.op)
    # By position where the signature allows, as models call them. A keyword costs a fused function more than a plain
    # one: 0.4 % of `activate` 8x256x512 forward, float32, where the function serves as it is (Xeon, 2 cores).
    bound = signature.bind(**case.tensors, **case.options)
    arguments, named = bound.args, bound.kwargs
    formula = {} if "backend" not in signature.parameters else {"backend": "eager"}

    def eager() -> Any:
        return case.op(*arguments, **named, **formula)

    def auto() -> Any:
        return fused(*arguments, **named)

    return _step(eager, (), leaves, use), _step(auto, (), leaves, use)


def _step(call: Callable[..., Any], inputs: Sequence[Any], leaves: Iterable[Tensor], use: str) -> Step:
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
    name: str, use: str, steps: Callable[[str], tuple[Step, Step]], *, device: torch.device, keep: bool
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
        eager, auto = steps(use)
        for _ in range(_CALLS_TO_DECIDE):
            auto()
        return in_turns(eager, auto, device)

    with patience(0), measured_anew(device.type, keep=keep) as found:
        ratio = timed()
        again = _chosen_again(found, timed, use) if ratio.median < _WORTH_IT else []
        if again:
            ratio = timed()
        parts = [_row(label, seconds, again=label in again) for label, seconds in found.items()]
    chosen = ", ".join(sorted({row.chosen for row in parts if row.identity})) or "not measured"
    return Row(name, use, {}, chosen, ratio=ratio, identity="", again=bool(again)), parts


def _chosen_again(found: dict[str, Mapping[str, float | None]], timed: Callable[[], Ratio], use: str) -> list[str]:
    """Let each candidate serve all graphs, and take the best; returns the graphs that it serves, none if nothing is
    better than the choice as it was.

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
        return []
    before = {label: best_of(seconds) for label, seconds in graphs.items()}
    ratios: dict[str, float] = {}
    # As "auto" settles ties.
    for name in (_AS_BEFORE, *((*CANDIDATES, UNFUSED) if use == _TRAINING else (UNFUSED, *CANDIDATES))):
        serving = {label: before[label] if one.get(name) is None else name for label, one in graphs.items()}
        if name != _AS_BEFORE and serving == before:  # also with what works nowhere
            ratios[name] = ratios[_AS_BEFORE]
            continue
        found.update({label: {**dict.fromkeys(one), serving[label]: 1.0} for label, one in graphs.items()})
        ratios[name] = timed().median
    fast = {name: ratio for name, ratio in ratios.items() if ratio >= _WORTH_IT}
    best = best_of({name: 1 / ratio for name, ratio in (fast or ratios).items()})
    found.clear()
    if best == _AS_BEFORE:
        found.update(known)
        return []
    again = [label for label, seconds in graphs.items() if seconds.get(best) is not None]
    found.update({**graphs, **{label: _in_proportion(graphs[label], ratios, best) for label in again}})
    return again


def _in_proportion(
    seconds: Mapping[str, float | None], ratios: Mapping[str, float], chosen: str
) -> Mapping[str, float | None]:
    """A graph's seconds after a second choice, what is chosen first."""
    plain = seconds[UNFUSED]
    assert plain is not None  # the others' times were taken beside it
    shares = {name: None if one is None else plain / ratios[name] for name, one in seconds.items()}
    return {chosen: shares[chosen], **shares}


def _row(label: str, found: Mapping[str, float | None], *, again: bool) -> Row:
    known = read_label(label)
    seconds = {name: one for name, one in found.items() if one is not None}
    if known is None:
        return Row(label, "", seconds, best_of(seconds), ratio=None, identity="")
    function, use, identity = known
    return Row(function, use, seconds, best_of(seconds), ratio=None, identity=identity, again=again)
