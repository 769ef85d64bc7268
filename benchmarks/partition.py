"""Measures the fusion core beside PyTorch's partitioners: saved bytes, and memory against recompute.

python -m benchmarks.partition --json plots/cpu/intel_xeon_avx512/partition.json
"""

import argparse
import copy
import functools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.command import run_command
from benchmarks.layers import GPT, LAYERS, LayerCase
from benchmarks.torch_min_cut import torch_min_cut_at_budget
from fuselayers import __version__
from fuselayers.cli.bench.measure import COMPILE, Candidate, time_interleaved, wrong_numbers
from fuselayers.cli.files import write_text
from fuselayers.cli.machine import choose_device, measured_machine
from fuselayers.cli.parser import add_device
from fuselayers.cli.text import print_table, say
from fuselayers.partition import PartitionError, budget, capture, fuse, min_cut, saved_bytes
from fuselayers.partition.choose.cost import flops_of
from fuselayers.partition.joint_graph import JointGraph

Row = dict[str, float | int | str]
_EAGER: Final = "eager"
_OURS: Final = "fuse"
_DTYPES: Final = (torch.float32, torch.bfloat16)
_TORCH_BUDGETS: Final = (0.9, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
# Seeds and sizes, which torch does not count.
_SLACK_BYTES: Final = 1024
# The saved bytes of a layer are counted at one size: attention's tables grow with tokens / hidden.
_BATCH: Final = 4
_TOKENS: Final = 128
_HIDDEN_DIM: Final = 256
# The timed layers: hidden, and batch x tokens.
_TIMED: Final = (512, (8, 256))


def saved(device: torch.device, *, repeats: int, dtypes: Sequence[torch.dtype] = _DTYPES) -> list[Row]:
    """For each layer: units saved by eager, torch.compile and `fuse`, and the step time of `fuse` over the others'."""
    rows: list[Row] = []
    for name, case in LAYERS.items():
        for dtype in dtypes:
            make = functools.partial(_layers, case.make, dtype=dtype, device=device)
            wrong = _wrong_layers(make(_HIDDEN_DIM, (_BATCH, _TOKENS), dropout=0.0), case.make)
            counted = units(case, dtype=dtype, device=device)
            # Otherwise this is a second shape of the same functions, and Dynamo traces it with symbolic sizes.
            torch.compiler.reset()
            right = [layer.candidate() for layer in make(*_TIMED) if layer.name not in wrong]
            times = time_interleaved(right, repeats=repeats, device=device)
            steps = {layer: seconds["forward_backward"] for layer, seconds in times.items()}
            rows.append(
                {
                    "layer": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    **{key: round(value, 3) for key, value in counted.items()},
                    "target": case.target,
                    "matmuls again": matmuls_again(case, dtype=dtype, device=device),
                    "step / torch.compile": _ratio(steps, _OURS, COMPILE),
                    "step / eager": _ratio(steps, _OURS, _EAGER),
                    "wrong": "; ".join(f"{form}: {reason}" for form, reason in wrong.items()),
                }
            )
    return rows


def units(case: LayerCase, *, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """The bytes that each version of one layer saves for backward, in batch x tokens x hidden x itemsize."""
    torch.compiler.reset()  # after 8 graphs of one function torch.compile would run it uncompiled
    layers = _layers(case.make, _HIDDEN_DIM, (_BATCH, _TOKENS), dtype=dtype, device=device)
    unit = _BATCH * _TOKENS * _HIDDEN_DIM * dtype.itemsize
    return {layer.name: saved_bytes(layer.fn, layer.x) / unit for layer in layers}


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
        _Layer(_EAGER, plain, plain, x),
        _Layer(COMPILE, torch.compile(twins[0]), twins[0], x),
        _Layer(_OURS, fuse(twins[1], backend="inductor", fallback=()), twins[1], x),
    ]


def _wrong_layers(layers: Sequence[_Layer], make: Callable[..., nn.Module]) -> dict[str, str]:
    """The error of each wrong version; the first layer is eager."""
    eager = layers[0]
    exact = make(eager.x.shape[-1], 4, dropout=0.0).to(eager.x.device, torch.float64)
    exact.load_state_dict(eager.plain.state_dict())
    truth = _Layer("float64", exact, exact, eager.x.detach().double().requires_grad_())
    others = [layer.candidate() for layer in layers[1:]]
    return wrong_numbers(others, eager=eager.candidate(), truth=truth.candidate())


def _ratio(steps: Mapping[str, list[float]], mine: str, other: str) -> float | str:
    """The median of the ratios of two steps that ran one after the other."""
    if mine not in steps or other not in steps:
        return "-"
    pairs = zip(steps[mine], steps[other], strict=True)
    return round(statistics.median(ours / theirs for ours, theirs in pairs), 3)


def budgets(*, num_layers: int = 4) -> list[Row]:
    """Units per layer and share of forward's FLOPs recomputed, for torch's `activation_memory_budget` and `fuse`."""
    with torch.device("meta"):
        model = GPT(num_layers, hidden_dim=_HIDDEN_DIM, context_length=_TOKENS, vocab_size=1000)
        text = torch.zeros(_BATCH, _TOKENS, dtype=torch.int64)
    (graph,) = capture(model, text, text)
    unit = _BATCH * _TOKENS * _HIDDEN_DIM * 4 * num_layers
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
    """Return "fuse" or "torch", whichever recomputes fewer FLOPs, or at equal FLOPs saves fewer bytes; else "same"."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--repeats", type=int, default=50, help="timings of each candidate (default 50)")
    add_device(parser)
    parser.add_argument("--json", metavar="FILE", help="also write all measurements to this file")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure and print.

    Returns:
        The exit code: 0, or 1 when numbers are wrong, or when `fuse` costs more than torch at a budget.

    Raises:
        ValueError: a wrong argument.
    """
    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {arguments.repeats}")
    device = choose_device(arguments.device, setting="--device")
    machine = f"{measured_machine(device)}, fuselayers {__version__}"
    say(console, machine, "", "one layer: saved for backward, in batch x tokens x hidden x itemsize, dropout 0.1")
    layers = saved(device, repeats=arguments.repeats)
    print_table(console, [{heading: cell for heading, cell in row.items() if heading != "wrong"} for row in layers])
    wrong = [f"{row['layer']} {row['dtype']}: {row['wrong']}" for row in layers if row["wrong"]]
    say(console, *(f"not timed, the numbers are wrong: {line}" for line in wrong), "")
    say(console, "memory against recompute: units per layer, share of forward's FLOPs recomputed")
    points = budgets()
    print_table(console, points)
    say(console, budget_note(points))
    if arguments.json:
        content = {"date": date.today().isoformat(), "machine": machine, "repeats": arguments.repeats}
        sections = {"saved": layers, "budget": points}
        write_text(Path(arguments.json), json.dumps(content | {"sections": sections}, indent=2) + "\n")
    return int(bool(wrong) or any(row["lower"] == "torch" for row in points))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    description = (__doc__ or "").partition("\n")[0]
    return run_command("benchmarks.partition", description, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
