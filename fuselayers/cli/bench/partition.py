"""What `fuselayers bench partition` measures: what is saved, at what price, and how long the choice takes."""

import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...partition import CapturedGraph, Partitioner, budget, capture, fuse, min_cut, saved_bytes
from ...partition.cost import flops_of
from ...partition.flow import minimum_cut
from ...partition.joint_graph import JointGraph
from ...partition.partitioners import cost_model_for
from ...partition.saved_by_min_cut import flow_graph
from ...partition.torch_private import copy_of, torch_min_cut_at_budget, torch_min_cut_partition
from ..machine import synchronize
from .layers import GPT, LAYERS
from .measure import Candidate, disagreement, results, time_interleaved

__all__ = ["SECTIONS", "Row", "Setting"]

Row = dict[str, float | int | str]
_EAGER: Final = "eager"
_COMPILE: Final = "torch.compile"
_OURS: Final = "fuse"
_TORCH_BUDGETS: Final = (0.9, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
# Seeds and sizes, which the rivals do not all count.
_SLACK_BYTES: Final = 1024


@dataclass(frozen=True)
class Setting:
    """How much is measured.

    Attributes:
        device: where.
        repeats: how often each candidate is timed.
        num_layers: of the model whose budget curve is drawn.
        depths: of the models that are cut against the clock.
        hidden_dim: of the layers whose steps are timed; what they save is counted at half of it.
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
            torch.compiler.reset()  # after 8 shapes of one function torch.compile would run it uncompiled
            hidden, tokens = setting.hidden_dim // 2, 128
            make = functools.partial(_candidates, case.make, dtype=dtype, device=setting.device)
            small = make(hidden, shape=(4, tokens))
            unit = 4 * tokens * hidden * dtype.itemsize
            kept = {one.name: saved_bytes(one.fn, one.x) / unit for one in small}
            (graph,) = capture(small[0].fn, small[0].x, device=setting.device)
            joint = _joint(graph)
            again = [node for node in joint.recomputed(min_cut.saved_values(joint, fused=True)) if flops_of(node) > 0]
            wrong = _wrong(make(hidden, shape=(4, tokens), dropout=0.0), case.make, hidden)
            timed = make(setting.hidden_dim, shape=(8, 256))
            step = _step_medians([one for one in timed if one.name not in wrong], setting)
            rows.append(
                {
                    "layer": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    **{key: round(value, 2) for key, value in kept.items()},
                    "target": case.target,
                    "matmuls again": len(again),
                    "step / torch.compile": _ratio(step, _OURS, _COMPILE),
                    "step / eager": _ratio(step, _OURS, _EAGER),
                    "wrong": ", ".join(wrong),
                }
            )
    return rows


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
        _Layer(_EAGER, plain, plain, x),
        _Layer(_COMPILE, torch.compile(twins[0]), twins[0], x),
        _Layer(_OURS, fuse(twins[1], backend="inductor", fallback=()), twins[1], x),
    ]


def _wrong(layers: Sequence[_Layer], make: Callable[..., nn.Module], hidden_dim: int) -> list[str]:
    """Those whose numbers without dropout are not eager's; they are not timed."""
    eager = layers[0]
    exact = make(hidden_dim, 4, dropout=0.0).to(eager.x.device, torch.float64)
    exact.load_state_dict(eager.plain.state_dict())
    truth_x = eager.x.detach().double().requires_grad_()
    truth = results(_Layer("float64", exact, exact, truth_x).candidate())
    measure = results(eager.candidate())
    return [
        one.name for one in layers[1:] if disagreement(results(one.candidate()), eager=measure, truth=truth) is not None
    ]


def _step_medians(layers: Sequence[_Layer], setting: Setting) -> dict[str, float]:
    timings = time_interleaved([one.candidate() for one in layers], repeats=setting.repeats, device=setting.device)
    return {one.name: statistics.median(timing.both) for one, timing in zip(layers, timings, strict=True)}


def _ratio(medians: dict[str, float], mine: str, other: str) -> float | str:
    return round(medians[mine] / medians[other], 3) if mine in medians and other in medians else "-"


def budgets(setting: Setting) -> list[Row]:
    """Units per layer and share of forward's FLOPs run again: torch's `activation_memory_budget`, ours in its bytes."""
    hidden, tokens, batch = 256, 128, 4
    graph = _captured_gpt(setting.num_layers, hidden_dim=hidden, tokens=tokens, batch=batch, vocab_size=1000)
    unit = batch * tokens * hidden * 4 * setting.num_layers
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
        size = theirs.saved_bytes(chosen)
        kept = budget(size + _SLACK_BYTES).saved_values(ours, fused=True)
        torch_again, our_again = again(theirs, chosen), again(ours, kept)
        rows.append(
            {
                "torch's budget": share,
                "torch units": round(size / unit, 3),
                "torch FLOPs %": round(torch_again, 2),
                "fuse units": round(ours.saved_bytes(kept) / unit, 3),
                "fuse FLOPs %": round(our_again, 2),
                "fuse is above": "yes" if our_again > torch_again + 1e-9 else "no",
            }
        )
    return rows


def speed(setting: Setting) -> list[Row]:
    """Seconds to cut models of growing depth: torch's min-cut partitioner, ours, its solver alone, a budget."""
    rows: list[Row] = []
    for depth in setting.depths:
        graph = _captured_gpt(depth, hidden_dim=64, tokens=32, batch=2, vocab_size=100)
        joint = _joint(graph)
        network = flow_graph(joint, cost=cost_model_for(joint, fused=True))
        seconds = {
            "torch": _cutting_seconds(graph, torch_min_cut_partition),
            "fuse": _cutting_seconds(graph, min_cut),
            "solver": _fastest(functools.partial(minimum_cut, network)),
            "budget": _cutting_seconds(graph, budget(0.3)),
        }
        rows.append(
            {
                "layers": depth,
                "nodes": len(graph.module.graph.nodes),
                **{key: round(value, 3) for key, value in seconds.items()},
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
        _EAGER: little,
        _COMPILE: torch.compile(compiled),
        "fuse, inductor": fuse(little, backend="inductor", fallback=()),
        "fuse, eager": fuse(little, backend="eager", fallback=()),
    }
    with _one_thread():
        medians = _interleaved_medians(forms, leaves, repeats=100 * setting.repeats, device=setting.device)
    return [
        {"call": name, "us": round(1e6 * both, 1), "/ torch.compile": round(both / medians[_COMPILE][1], 3)}
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
        _EAGER: function,
        _COMPILE: torch.compile(compiled),
        _OURS: fuse(function, backend="inductor", fallback=()),
    }
    size = leaves[0].numel() * leaves[0].element_size()
    medians = _interleaved_medians(forms, leaves, repeats=setting.repeats, device=setting.device)
    return [
        {
            "form": name,
            "tensors saved": saved_bytes(forms[name], *leaves) // size,
            "forward ms": round(1e3 * forward, 2),
            "forward + backward ms": round(1e3 * both, 2),
            "forward x": round(medians[_EAGER][0] / forward, 2),
            "forward + backward x": round(medians[_EAGER][1] / both, 2),
        }
        for name, (forward, both) in medians.items()
    ]


SECTIONS: Final = MappingProxyType(
    {
        "saved": ("one layer: kept for backward, in batch x tokens x hidden x itemsize, dropout 0.1", saved),
        "budget": ("memory against recompute: units per layer, share of forward's FLOPs run again", budgets),
        "speed": ("seconds to cut a model's graph", speed),
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


def _cutting_seconds(graph: CapturedGraph, cut: Partitioner | Callable[..., Any]) -> float:
    """The time of a partitioner on a fresh copy of the graph."""
    copies = [copy_of(graph.module) for _ in range(2)]
    static = list(graph.static_input_indices)

    def run() -> None:
        cut(
            copies.pop(),
            graph.joint_inputs,
            num_fwd_outputs=graph.num_forward_outputs,
            static_lifetime_input_indices=static,
        )

    return _fastest(run, repeats=len(copies))


def _fastest(run: Callable[[], object], *, repeats: int = 3) -> float:
    """The least of a few times: what else the machine does can only add to it."""
    times = []
    for _ in range(repeats):
        gc.collect()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _interleaved_medians(
    forms: dict[str, Callable[..., Tensor]], leaves: tuple[Tensor, ...], *, repeats: int, device: torch.device
) -> dict[str, tuple[float, float]]:
    """Median seconds of forward, and of forward with backward, for each form; in turns."""
    synchronize(device)
    candidates = [Candidate(name, functools.partial(_as_tuple, form, leaves), leaves) for name, form in forms.items()]
    timings = time_interleaved(candidates, repeats=repeats, device=device)
    return {
        one.name: (statistics.median(timing.forward), statistics.median(timing.both))
        for one, timing in zip(candidates, timings, strict=True)
    }


def _as_tuple(form: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (form(*leaves),)
