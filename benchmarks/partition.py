"""Measures the fusion core beside PyTorch's partitioners: saved bytes, memory against recompute, time to cut a graph.

python -m benchmarks.partition --json plots/cpu/intel_xeon_avx512/partition.json
"""

import argparse
import copy
import functools
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.command import run_command
from benchmarks.layers import GPT, LAYERS, LayerCase
from fuselayers import __version__
from fuselayers._torch.tracing import copy_of, torch_min_cut_at_budget, torch_min_cut_partition
from fuselayers.cli.bench.measure import EAGER, Candidate, Timing, time_interleaved
from fuselayers.cli.bench.subjects import COMPILE, wrong_numbers
from fuselayers.cli.files import write_text
from fuselayers.cli.machine import choose_device, measured_machine
from fuselayers.cli.parser import add_device
from fuselayers.cli.text import chosen_names, print_table, say
from fuselayers.partition import CapturedGraph, PartitionError, budget, capture, fuse, min_cut, saved_bytes
from fuselayers.partition.cost import flops_of
from fuselayers.partition.flow import minimum_cut
from fuselayers.partition.joint_graph import JointGraph
from fuselayers.partition.partitioners import cost_model_for
from fuselayers.partition.saved_by_min_cut import flow_graph
from fuselayers.partition.timer import Step, median_seconds, time_in_turns

Row = dict[str, float | int | str]
_OURS: Final = "fuse"
_TORCH_BUDGETS: Final = (0.9, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
# Seeds and sizes, which torch does not count.
_SLACK_BYTES: Final = 1024
# The saved bytes of a layer are counted at one size: attention's tables grow with tokens / hidden.
_BATCH: Final = 4
_TOKENS: Final = 128
_HIDDEN_DIM: Final = 256
_SPEED_ROUNDS: Final = 3


@dataclass(frozen=True)
class Setting:
    """The sizes of the measurements.

    Attributes:
        device: of the tensors.
        repeats: timings of each candidate.
        num_layers: of the model for "budget".
        depths: of the models for "speed".
        hidden_dim: of the timed layers, on 8 x 256 tokens; saved bytes are counted at 4 x 128 x 256.
        dtypes: of the layers.
    """

    device: torch.device
    repeats: int = 30
    num_layers: int = 4
    depths: tuple[int, ...] = (12, 24, 48, 96)
    hidden_dim: int = 512
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def saved(setting: Setting) -> list[Row]:
    """For each layer: units saved by eager, torch.compile and `fuse`, and the time of a step against both."""
    rows: list[Row] = []
    for name, case in LAYERS.items():
        for dtype in setting.dtypes:
            made = functools.partial(_layers, case.make, dtype=dtype, device=setting.device)
            wrong = _wrong_layers(made(_HIDDEN_DIM, (_BATCH, _TOKENS), dropout=0.0), case.make)
            counted = units(case, dtype=dtype, device=setting.device)
            # Otherwise this is a second shape of the same functions, and Dynamo traces it with symbolic sizes.
            torch.compiler.reset()
            right = [one.candidate() for one in made(setting.hidden_dim, (8, 256)) if one.name not in wrong]
            step = _timed(right, setting.repeats, setting.device)
            rows.append(
                {
                    "layer": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    **{key: round(value, 3) for key, value in counted.items()},
                    "target": case.target,
                    "matmuls again": matmuls_again(case, dtype=dtype, device=setting.device),
                    "step / torch.compile": _ratio(step, _OURS, COMPILE),
                    "step / eager": _ratio(step, _OURS, EAGER),
                    "wrong": "; ".join(f"{name}: {reason}" for name, reason in wrong.items()),
                }
            )
    return rows


def units(case: LayerCase, *, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """The bytes that each version of one layer saves for backward, in batch x tokens x hidden x itemsize."""
    torch.compiler.reset()  # after 8 graphs of one function torch.compile would run it uncompiled
    layers = _layers(case.make, _HIDDEN_DIM, (_BATCH, _TOKENS), dtype=dtype, device=device)
    unit = _BATCH * _TOKENS * _HIDDEN_DIM * dtype.itemsize
    return {one.name: saved_bytes(one.fn, one.x) / unit for one in layers}


def matmuls_again(case: LayerCase, *, dtype: torch.dtype, device: torch.device) -> int:
    """The number of matmuls and attentions of the layer's forward that our default cut recomputes."""
    layer = _layers(case.make, _HIDDEN_DIM, (_BATCH, _TOKENS), dtype=dtype, device=device)[0]
    (graph,) = capture(layer.plain, layer.x, device=device)
    joint = graph.joint()
    return sum(flops_of(node) > 0 for node in joint.recomputed(min_cut.saved_values(joint, fused=True)))


@dataclass(frozen=True)
class _Layer:
    """A version of a layer: its function, its module, and its input."""

    name: str
    fn: Callable[[Tensor], Tensor]
    plain: nn.Module
    x: Tensor

    def candidate(self) -> Candidate:
        return Candidate(self.name, lambda: (self.fn(self.x),), (self.x, *self.plain.parameters()))


def _layers(
    make: Callable[..., nn.Module],
    hidden_dim: int,
    shape: tuple[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    dropout: float = 0.1,
) -> list[_Layer]:
    """The same layer in eager mode, through torch.compile, and through `fuse`; equal weights, one input."""
    torch.manual_seed(0)
    plain = make(hidden_dim, 4, dropout=dropout).to(device=device, dtype=dtype)
    x = torch.randn(*shape, hidden_dim, device=device, dtype=dtype, requires_grad=True)
    twins = [copy.deepcopy(plain) for _ in range(2)]
    return [
        _Layer(EAGER, plain, plain, x),
        _Layer(COMPILE, torch.compile(twins[0]), twins[0], x),
        _Layer(_OURS, fuse(twins[1], backend="inductor", fallback=()), twins[1], x),
    ]


def _wrong_layers(layers: Sequence[_Layer], make: Callable[..., nn.Module]) -> dict[str, str]:
    """The error of each wrong version; the first layer is eager."""
    eager = layers[0]
    exact = make(eager.x.shape[-1], 4, dropout=0.0).to(eager.x.device, torch.float64)
    exact.load_state_dict(eager.plain.state_dict())
    truth = _Layer("float64", exact, exact, eager.x.detach().double().requires_grad_())
    others = [one.candidate() for one in layers[1:]]
    return wrong_numbers(others, eager=eager.candidate(), truth=truth.candidate())


def _timed(candidates: Sequence[Candidate], repeats: int, device: torch.device) -> dict[str, Timing]:
    timings = time_interleaved(candidates, repeats=repeats, device=device)
    return {one.name: timing for one, timing in zip(candidates, timings, strict=True)}


def _ratio(steps: Mapping[str, Timing], mine: str, other: str) -> float | str:
    """The median of the ratios, each of two steps that ran one after the other."""
    if mine not in steps or other not in steps:
        return "-"
    pairs = zip(steps[mine].both, steps[other].both, strict=True)
    return round(statistics.median(one / two for one, two in pairs), 3)


def budgets(setting: Setting) -> list[Row]:
    """Units per layer and share of forward's FLOPs recomputed, of torch's `activation_memory_budget` and of `fuse`."""
    graph = _captured_gpt(setting.num_layers, hidden_dim=_HIDDEN_DIM, tokens=_TOKENS, batch=_BATCH, vocab_size=1000)
    unit = _BATCH * _TOKENS * _HIDDEN_DIM * 4 * setting.num_layers
    ours = graph.joint()
    forward_flops = sum(flops_of(node) for node in ours.nodes if node in ours.forward)

    def again(joint: JointGraph, kept: Sequence[Any]) -> float:
        return 100 * sum(flops_of(node) for node in joint.recomputed(kept)) / forward_flops

    rows: list[Row] = []
    for share in _TORCH_BUDGETS:
        theirs = graph.joint()
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
        except PartitionError:  # the budget is too small
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
    """Which one recomputes fewer FLOPs; at equal FLOPs, which one saves fewer bytes."""
    more = ours[0] - theirs[0]
    if abs(more) < 1e-6:
        more = ours[1] - theirs[1] if abs(ours[1] - theirs[1]) > _SLACK_BYTES else 0
    return "same" if more == 0 else "torch" if more > 0 else "fuse"


def budget_note(rows: Sequence[Row]) -> str:
    """Summarise the rows of `budgets` in a line."""
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
        joint = graph.joint()
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
    """Microseconds of a forward and backward on tiny tensors: the cost of a call."""
    leaves = tuple(torch.randn(8, 16, device=setting.device, requires_grad=True) for _ in range(3))
    exact = tuple(leaf.detach().double().requires_grad_() for leaf in leaves)

    def little(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x * weight + bias).sin()

    def compiled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # Dynamo keeps compiled code per function
        return little(x, weight, bias)

    def candidate(name: str, form: Callable[..., Tensor], inputs: tuple[Tensor, ...] = leaves) -> Candidate:
        return Candidate(name, lambda: (form(*inputs),), inputs)

    eager = candidate(EAGER, little)
    others = [
        candidate(COMPILE, torch.compile(compiled)),
        candidate("fuse, inductor", fuse(little, backend="inductor", fallback=())),
        candidate("fuse, eager", fuse(little, backend="eager", fallback=())),
    ]
    wrong = wrong_numbers(others, eager=eager, truth=candidate("float64", little, exact))
    right = [eager, *(one for one in others if one.name not in wrong)]
    with _one_thread():
        steps = _timed(right, 100 * setting.repeats, setting.device)
    return [
        {
            "call": one.name,
            "us": round(1e6 * statistics.median(steps[one.name].both), 1) if one.name in steps else "-",
            "/ torch.compile": _ratio(steps, one.name, COMPILE),
            "wrong": wrong.get(one.name, ""),
        }
        for one in (eager, *others)
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    """128 elements need no second thread; on a busy machine waiting for one would dominate the measurement."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


SECTIONS: Final = MappingProxyType(
    {
        "saved": ("one layer: saved for backward, in batch x tokens x hidden x itemsize, dropout 0.1", saved),
        "budget": ("memory against recompute: units per layer, share of forward's FLOPs recomputed", budgets),
        "speed": ("seconds to cut the graph of a GPT: torch's min-cut, fuse, its solver alone, budget(0.3)", speed),
        "overhead": ("a call of gelu(x * w + b).sin() on 8 x 16, forward + backward", overhead),
    }
)
"""By name: what each table shows, and the function that measures its rows."""


def _captured_gpt(num_layers: int, *, hidden_dim: int, tokens: int, batch: int, vocab_size: int) -> CapturedGraph:
    with torch.device("meta"):
        model = GPT(num_layers, hidden_dim=hidden_dim, context_length=tokens, vocab_size=vocab_size)
        text = torch.zeros(batch, tokens, dtype=torch.int64)
    (graph,) = capture(model, text, text)
    return graph


def _cutting_seconds(
    graph: CapturedGraph, cuts: dict[str, Callable[..., object]], *, alone: dict[str, Callable[[], object]]
) -> dict[str, float]:
    """Median times of partitioners, each on a fresh copy of the graph, and of functions without arguments; in turns."""
    options = {
        "num_fwd_outputs": graph.num_forward_outputs,
        "static_lifetime_input_indices": list(graph.static_input_indices),
    }

    def fresh_copy() -> Any:
        gc.collect()
        return copy_of(graph.module)

    def cut_with(cut: Callable[..., object], module: Any) -> object:
        return cut(module, graph.joint_inputs, **options)

    steps = {name: Step(functools.partial(cut_with, cut), fresh_copy) for name, cut in cuts.items()}
    steps |= {name: Step(lambda _, run=run: run(), gc.collect) for name, run in alone.items()}  # type: ignore[misc]
    times = time_in_turns(steps, device=torch.device("cpu"), rounds=_SPEED_ROUNDS, warm_up=0)
    return median_seconds(times)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--only", metavar="SECTIONS", help=f"comma-separated, of {', '.join(SECTIONS)} (default all)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the budget's model (default 4)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller models")
    parser.add_argument("--repeats", type=int, default=50, help="timings of each candidate (default 50)")
    add_device(parser)
    parser.add_argument("--json", metavar="FILE", help="also write all measurements to this file")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure and print.

    Returns:
        The exit code: 0, or 1 when numbers are wrong, or a budget of ours costs more than torch's.

    Raises:
        ValueError: a wrong argument; the text lists the possible ones.
    """
    for option in ("repeats", "layers"):
        if getattr(arguments, option) < 1:
            raise ValueError(f"--{option} must be at least 1, got {getattr(arguments, option)}")
    device = choose_device(arguments.device, setting="--device")
    setting = Setting(device=device, repeats=arguments.repeats, num_layers=arguments.layers)
    if arguments.quick:
        setting = replace(setting, depths=setting.depths[:2], hidden_dim=256)
    chosen = chosen_names("section of benchmarks.partition", arguments.only, SECTIONS)
    machine = f"{measured_machine(device)}, fuselayers {__version__}"
    say(console, machine)
    measured: dict[str, list[Row]] = {}
    for name in chosen:
        title, measure = SECTIONS[name]
        rows = measured[name] = measure(setting)
        shown = [{heading: cell for heading, cell in row.items() if heading != "wrong"} for row in rows]
        say(console, "", title)
        print_table(console, shown)
        if name == "budget":
            say(console, budget_note(rows))
        for row in rows:
            if row.get("wrong"):
                where = " ".join(str(row[key]) for key in ("layer", "dtype", "call") if key in row)
                say(console, f"not timed, the numbers are wrong: {where}: {row['wrong']}")
    if arguments.json:
        content = {"date": date.today().isoformat(), "machine": machine, "repeats": setting.repeats}
        write_text(Path(arguments.json), json.dumps(content | {"sections": measured}, indent=2) + "\n")
    return int(any(row.get("wrong") or row.get("lower") == "torch" for rows in measured.values() for row in rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    description = (__doc__ or "").partition("\n")[0]
    return run_command("benchmarks.partition", description, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
