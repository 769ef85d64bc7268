"""What `fuselayers bench partition` measures: what is saved, at what price, and how long the choice takes."""

import copy
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..._torch.tracing import copy_of, torch_min_cut_at_budget, torch_min_cut_partition
from ...partition import CapturedGraph, PartitionError, budget, capture, fuse, min_cut, saved_bytes
from ...partition.cost import flops_of
from ...partition.flow import minimum_cut
from ...partition.joint_graph import JointGraph
from ...partition.partitioners import cost_model_for
from ...partition.saved_by_min_cut import flow_graph
from ..machine import synchronize
from .layers import GPT, LAYERS, LayerCase
from .measure import EAGER, Candidate, Timing, disagreement, results, time_interleaved

__all__ = ["SECTIONS", "Row", "Setting", "budget_note", "matmuls_again", "units"]

Row = dict[str, float | int | str]
_COMPILE: Final = "torch.compile"
_OURS: Final = "fuse"
_TORCH_BUDGETS: Final = (0.9, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
# Seeds and sizes, which the rivals do not all count.
_SLACK_BYTES: Final = 1024
# What a layer keeps is counted at one size: attention's tables grow with tokens / hidden, so a target holds for one.
_BATCH: Final = 4
_TOKENS: Final = 128
_HIDDEN_DIM: Final = 256
_SPEED_ROUNDS: Final = 3


@dataclass(frozen=True)
class Setting:
    """How much is measured.

    Attributes:
        device: where.
        repeats: how often each candidate is timed.
        num_layers: of the model whose budget curve is drawn.
        depths: of the models that are cut against the clock.
        hidden_dim: of the layers whose steps are timed, on 8 x 256 tokens; what they save is counted at 4 x 128 x 256.
        dtypes: of these layers.
    """

    device: torch.device
    repeats: int = 30
    num_layers: int = 4
    depths: tuple[int, ...] = (12, 24, 48, 96)
    hidden_dim: int = 512
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def saved(setting: Setting) -> list[Row]:
    """For each layer: units kept by eager, torch.compile and `fuse`, and the time of a step against both."""
    rows: list[Row] = []
    for name, case in LAYERS.items():
        for dtype in setting.dtypes:
            kept = units(case, dtype=dtype, device=setting.device)
            make = functools.partial(_candidates, case.make, dtype=dtype, device=setting.device)
            wrong = _wrong(make(_HIDDEN_DIM, shape=(_BATCH, _TOKENS), dropout=0.0), case.make, _HIDDEN_DIM)
            # Else this would be a second shape of a known function, and the graphs that are timed symbolic ones.
            torch.compiler.reset()
            timed = make(setting.hidden_dim, shape=(8, 256))
            step = _steps([one for one in timed if one.name not in wrong], setting)
            rows.append(
                {
                    "layer": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    **{key: round(value, 3) for key, value in kept.items()},
                    "target": case.target,
                    "matmuls again": matmuls_again(case, dtype=dtype, device=setting.device),
                    "step / torch.compile": _ratio(step, _OURS, _COMPILE),
                    "step / eager": _ratio(step, _OURS, EAGER),
                    "wrong": _reasons(wrong),
                }
            )
    return rows


def units(case: LayerCase, *, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """What each form of one layer keeps for backward, in batch x tokens x hidden x itemsize."""
    torch.compiler.reset()  # after 8 graphs of one function torch.compile would run it uncompiled
    layers = _candidates(case.make, _HIDDEN_DIM, shape=(_BATCH, _TOKENS), dtype=dtype, device=device)
    unit = _BATCH * _TOKENS * _HIDDEN_DIM * dtype.itemsize
    return {one.name: saved_bytes(one.fn, one.x) / unit for one in layers}


def matmuls_again(case: LayerCase, *, dtype: torch.dtype, device: torch.device) -> int:
    """How many matmuls and attentions of the layer's forward our default cut runs a second time."""
    layer = _candidates(case.make, _HIDDEN_DIM, shape=(_BATCH, _TOKENS), dtype=dtype, device=device)[0]
    (graph,) = capture(layer.plain, layer.x, device=device)
    joint = _joint(graph)
    return sum(flops_of(node) > 0 for node in joint.recomputed(min_cut.saved_values(joint, fused=True)))


class _Layer:
    """A candidate with its module or fused function, and its input."""

    def __init__(self, name: str, fn: Callable[[Tensor], Tensor], plain: nn.Module, x: Tensor) -> None:
        self.name, self.fn, self.plain, self.x = name, fn, plain, x

    def candidate(self) -> Candidate:
        leaves = (self.x, *self.plain.parameters())
        return Candidate(self.name, lambda: (self.fn(self.x),), leaves)


def _candidates(
    make: Callable[..., nn.Module],
    hidden_dim: int,
    *,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    dropout: float = 0.1,
) -> list[_Layer]:
    """The same layer three times: as it is, through torch.compile, through `fuse`; equal weights, one input."""
    torch.manual_seed(0)
    plain = make(hidden_dim, 4, dropout=dropout).to(device=device, dtype=dtype)
    x = torch.randn(*shape, hidden_dim, device=device, dtype=dtype, requires_grad=True)
    twins = [copy.deepcopy(plain) for _ in range(2)]
    return [
        _Layer(EAGER, plain, plain, x),
        _Layer(_COMPILE, torch.compile(twins[0]), twins[0], x),
        _Layer(_OURS, fuse(twins[1], backend="inductor", fallback=()), twins[1], x),
    ]


def _wrong(layers: Sequence[_Layer], make: Callable[..., nn.Module], hidden_dim: int) -> dict[str, str]:
    """Those whose numbers without dropout are not eager's, and why; they are not timed."""
    eager = layers[0]
    exact = make(hidden_dim, 4, dropout=0.0).to(eager.x.device, torch.float64)
    exact.load_state_dict(eager.plain.state_dict())
    truth = _Layer("float64", exact, exact, eager.x.detach().double().requires_grad_())
    return _disagreements([one.candidate() for one in layers], truth=truth.candidate())


def _disagreements(candidates: Sequence[Candidate], *, truth: Candidate) -> dict[str, str]:
    """Why each wrong candidate is wrong; the first is eager, whose error is the measure."""
    exact, eager = results(truth), results(candidates[0])
    reasons = {one.name: disagreement(results(one), eager=eager, truth=exact) for one in candidates[1:]}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _reasons(wrong: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in wrong.items())


def _steps(layers: Sequence[_Layer], setting: Setting) -> dict[str, Timing]:
    timings = time_interleaved([one.candidate() for one in layers], repeats=setting.repeats, device=setting.device)
    return {one.name: timing for one, timing in zip(layers, timings, strict=True)}


def _ratio(steps: dict[str, Timing], mine: str, other: str) -> float | str:
    """The median of the ratios, each of two steps that ran one after the other."""
    if mine not in steps or other not in steps:
        return "-"
    pairs = zip(steps[mine].both, steps[other].both, strict=True)
    return round(statistics.median(one / two for one, two in pairs), 3)


def budgets(setting: Setting) -> list[Row]:
    """Units per layer and share of forward's FLOPs run again: torch's `activation_memory_budget`, ours in its bytes."""
    graph = _captured_gpt(setting.num_layers, hidden_dim=_HIDDEN_DIM, tokens=_TOKENS, batch=_BATCH, vocab_size=1000)
    unit = _BATCH * _TOKENS * _HIDDEN_DIM * 4 * setting.num_layers
    ours = _joint(graph)
    forward_flops = sum(flops_of(node) for node in ours.nodes if node in ours.forward)

    def again(joint: JointGraph, kept: Sequence[Any]) -> float:
        return 100 * sum(flops_of(node) for node in joint.recomputed(kept)) / forward_flops

    rows: list[Row] = []
    for share in _TORCH_BUDGETS:
        theirs = _joint(graph)
        chosen = torch_min_cut_at_budget(
            theirs.module,
            share,
            num_fwd_outputs=graph.num_forward_outputs,
            static_lifetime_input_indices=list(graph.static_input_indices),
        )
        size, torch_again = theirs.saved_bytes(chosen), again(theirs, chosen)
        row: Row = {
            "torch's budget": share,
            "torch units": round(size / unit, 3),
            "torch FLOPs %": round(torch_again, 2),
        }
        try:
            kept = budget(size + _SLACK_BYTES).saved_values(ours, fused=True)
        except PartitionError:  # not that small
            row |= {"fuse units": "-", "fuse FLOPs %": "-", "lower": "torch"}
        else:
            our_size, our_again = ours.saved_bytes(kept), again(ours, kept)
            row |= {
                "fuse units": round(our_size / unit, 3),
                "fuse FLOPs %": round(our_again, 2),
                "lower": _lower((our_again, our_size), (torch_again, size)),
            }
        rows.append(row)
    return rows


def _lower(ours: tuple[float, float], theirs: tuple[float, float]) -> str:
    """Which has fewer FLOPs to run again; where these are the same, fewer bytes, the slack aside."""
    more = ours[0] - theirs[0]
    if abs(more) < 1e-6:
        more = ours[1] - theirs[1] if abs(ours[1] - theirs[1]) > _SLACK_BYTES else 0
    return "same" if more == 0 else "torch" if more > 0 else "fuse"


def budget_note(rows: Sequence[Row]) -> str:
    """What the rows of `budgets` come to, in a line."""
    above = [str(row["torch's budget"]) for row in rows if row["lower"] == "torch"]
    if above:
        return f"fuse lies above torch's curve at torch's budget {', '.join(above)}."
    below = sum(row["lower"] == "fuse" for row in rows)
    return f"No point of fuse lies above torch's curve; {below} of {len(rows)} lie below."


def speed(setting: Setting) -> list[Row]:
    """Seconds to cut models of growing depth: torch's min-cut partitioner, ours, its solver alone, a budget."""
    rows: list[Row] = []
    for depth in setting.depths:
        graph = _captured_gpt(depth, hidden_dim=64, tokens=32, batch=2, vocab_size=100)
        joint = _joint(graph)
        network = flow_graph(joint, cost=cost_model_for(joint, fused=True))
        seconds = _cutting_seconds(
            graph,
            {"torch": torch_min_cut_partition, "fuse": min_cut, "budget": budget(0.3)},
            alone={"solver": functools.partial(minimum_cut, network)},
        )
        rows.append(
            {
                "layers": depth,
                "nodes": len(graph.module.graph.nodes),
                **{key: round(seconds[key], 3) for key in ("torch", "fuse", "solver", "budget")},
                "solver / fuse": round(seconds["solver"] / seconds["fuse"], 3),
                "torch / fuse": round(seconds["torch"] / seconds["fuse"], 2),
                "budget / fuse": round(seconds["budget"] / seconds["fuse"], 2),
            }
        )
    return rows


def overhead(setting: Setting) -> list[Row]:
    """Microseconds of a forward and backward that computes next to nothing: what a call costs."""
    leaves = tuple(torch.randn(8, 16, device=setting.device, requires_grad=True) for _ in range(3))

    def little(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x * weight + bias).sin()

    def compiled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return little(x, weight, bias)

    forms: dict[str, Callable[..., Tensor]] = {
        EAGER: little,
        _COMPILE: torch.compile(compiled),
        "fuse, inductor": fuse(little, backend="inductor", fallback=()),
        "fuse, eager": fuse(little, backend="eager", fallback=()),
    }
    with _one_thread():
        medians, wrong = _medians(forms, leaves, repeats=100 * setting.repeats, device=setting.device)
    return [
        {
            "call": name,
            "us": _rounded(1e6 * both, 1),
            "/ torch.compile": _rounded(both / medians[_COMPILE][1], 3),
            "wrong": wrong.get(name, ""),
        }
        for name, (_, both) in medians.items()
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    """128 elements need no second thread; waiting for one would be most of what is measured on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def tutorial(setting: Setting) -> list[Row]:
    """(a + b + c + d).cos().cos() on 1024 x 2048: tensors saved, and how many times as fast as eager."""
    leaves = tuple(torch.randn(1024, 2048, device=setting.device, requires_grad=True) for _ in range(4))

    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return (a + b + c + d).cos().cos()

    def compiled(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return function(a, b, c, d)

    forms: dict[str, Callable[..., Tensor]] = {
        EAGER: function,
        _COMPILE: torch.compile(compiled),
        _OURS: fuse(function, backend="inductor", fallback=()),
    }
    size = leaves[0].numel() * leaves[0].element_size()
    medians, wrong = _medians(forms, leaves, repeats=setting.repeats, device=setting.device)
    return [
        {
            "form": name,
            "tensors saved": saved_bytes(forms[name], *leaves) // size,
            "forward ms": _rounded(1e3 * forward, 2),
            "forward + backward ms": _rounded(1e3 * both, 2),
            "forward x": _rounded(medians[EAGER][0] / forward, 2),
            "forward + backward x": _rounded(medians[EAGER][1] / both, 2),
            "wrong": wrong.get(name, ""),
        }
        for name, (forward, both) in medians.items()
    ]


def _rounded(number: float, digits: int) -> float | str:
    return "-" if math.isnan(number) else round(number, digits)


SECTIONS: Final = MappingProxyType(
    {
        "saved": ("one layer: kept for backward, in batch x tokens x hidden x itemsize, dropout 0.1", saved),
        "budget": ("memory against recompute: units per layer, share of forward's FLOPs run again", budgets),
        "speed": ("seconds to cut the graph of a GPT: torch's min-cut, fuse, of it the solver, budget(0.3)", speed),
        "overhead": ("a call of gelu(x * w + b).sin() on 8 x 16, forward + backward", overhead),
        "tutorial": ("(a + b + c + d).cos().cos() on 1024 x 2048, float32", tutorial),
    }
)
"""By name: what each table shows, and the function that measures its rows."""


def _captured_gpt(num_layers: int, *, hidden_dim: int, tokens: int, batch: int, vocab_size: int) -> CapturedGraph:
    with torch.device("meta"):
        model = GPT(num_layers, hidden_dim=hidden_dim, context_length=tokens, vocab_size=vocab_size)
        text = torch.zeros(batch, tokens, dtype=torch.int64)
    (graph,) = capture(model, text, text)
    return graph


def _joint(graph: CapturedGraph) -> JointGraph:
    return JointGraph.of(
        copy_of(graph.module),
        num_forward_outputs=graph.num_forward_outputs,
        static_input_indices=graph.static_input_indices,
    )


def _cutting_seconds(
    graph: CapturedGraph, cuts: dict[str, Callable[..., object]], *, alone: dict[str, Callable[[], object]]
) -> dict[str, float]:
    """Median times of partitioners, each on a fresh copy of the graph, and of what needs none; in turns."""
    times: dict[str, list[float]] = {name: [] for name in (*cuts, *alone)}
    static = list(graph.static_input_indices)
    for _ in range(_SPEED_ROUNDS):
        runs: dict[str, Callable[[], object]] = {}
        for name, cut in cuts.items():
            runs[name] = functools.partial(
                cut,
                copy_of(graph.module),
                graph.joint_inputs,
                num_fwd_outputs=graph.num_forward_outputs,
                static_lifetime_input_indices=static,
            )
        for name, run in (runs | alone).items():
            gc.collect()
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _medians(
    forms: dict[str, Callable[..., Tensor]], leaves: tuple[Tensor, ...], *, repeats: int, device: torch.device
) -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    """Median seconds of forward, and of forward with backward, for each form, in turns; and what is wrong with some.

    The first form is plain eager PyTorch. Wrong ones are not timed: their seconds are NaN.
    """
    synchronize(device)
    exact = tuple(leaf.detach().double().requires_grad_() for leaf in leaves)
    candidates = [Candidate(name, functools.partial(_as_tuple, form, leaves), leaves) for name, form in forms.items()]
    truth = Candidate("float64", functools.partial(_as_tuple, forms[candidates[0].name], exact), exact)
    wrong = _disagreements(candidates, truth=truth)
    right = [one for one in candidates if one.name not in wrong]
    timings = time_interleaved(right, repeats=repeats, device=device)
    medians = dict.fromkeys(forms, (math.nan, math.nan))
    for one, timing in zip(right, timings, strict=True):
        medians[one.name] = statistics.median(timing.forward), statistics.median(timing.both)
    return medians, wrong


def _as_tuple(form: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (form(*leaves),)
