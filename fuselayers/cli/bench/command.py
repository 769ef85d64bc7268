"""`fuselayers bench`: checks and times an op or a model against eager PyTorch."""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from ...configs import choices
from ...names import shown
from ...ops import draw_seed
from ...ops.philox import keep_factors
from ...partition import backends
from ...partition.timer import Step, median_seconds, time_in_turns
from ..files import write_text
from ..machine import choose_device, measured_machine
from ..parser import add_device, add_imports, add_overrides
from ..text import chosen_names, print_table, say
from .cases import OPS, Settings, dtype_name, op_case
from .first_step import first_steps
from .measure import EAGER, OURS, Candidate, Timing, host_times, spread, time_interleaved
from .subjects import COMPILE, PLAIN, ModelCall, model_subject, op_candidate, op_subject
from .suite_command import MINUTES, run_suite

DESCRIPTION = """\
Checks that the numbers agree with eager PyTorch, then times. All candidates run in one process, in turns, after a
warm-up; tables show medians. Candidates with wrong numbers are not timed.

  fuselayers bench op bias_activation_dropout
  fuselayers bench model gpt_nano feedforward=mlp
  fuselayers bench suite --out results/"""
_OP = """\
Times one op: its formula in plain eager PyTorch, the same in torch.compile, and the op on each backend.

  fuselayers bench op bias_activation_dropout
  fuselayers bench op layer_norm --shape 4x1025x768 --dtype bfloat16
  fuselayers bench op dropout --parts
  fuselayers bench op layer_norm --overhead

--overhead measures what a call costs the host, on a small tensor, beside plain PyTorch. --parts times the forward of an
op with dropout, its mask alone, the op without dropout, and a copy of x."""
_MODEL = """\
Times one model of the configs: plain eager PyTorch without this library, the same in torch.compile, this library's
eager layers, and each backend. The last column is what a user waits for: the first forward and backward in a new
process, with an empty compile cache and with the one that it left. It compiles each of them twice more.

  fuselayers bench model gpt_nano feedforward=mlp --shape 16x128
  fuselayers bench model llama_tiny --dropout 0 --json result.json"""
_SUITE = """\
Measures every op in many shapes, dtypes and options, and whole models, against eager PyTorch, torch.compile and, on a
GPU, Liger-Kernel where it is installed. Writes a folder with the numbers, a table and pictures.

  fuselayers bench suite --out results/
  fuselayers bench suite --out results/ --ops layer_norm,rms_norm --minutes 3"""

_DTYPES: Final = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_FIRST_STEP: Final = "first step, cold / warm"
_REPEATS: Final = 50
_SUITE_REPEATS: Final = 20
_OP_SHAPE: Final = (8, 256, 512)
_SMALL_SHAPE: Final = (2, 4, 64)
_DEFAULT_BACKENDS: Final = ("eager", "inductor", COMPILE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a command for each subject, with arguments of its own."""
    subjects = parser.add_subparsers(dest="subject", metavar="SUBJECT", required=True)
    for name, summary, description, add in (
        ("op", "one op", _OP, _add_op),
        ("model", "one model of the configs", _MODEL, _add_model),
        ("suite", "every op, and models, into a folder", _SUITE, _add_suite),
    ):
        subject = subjects.add_parser(name, help=summary, description=description)
        add(subject)
        repeats = _SUITE_REPEATS if name == "suite" else _REPEATS
        subject.add_argument(
            "--repeats", type=int, default=repeats, help=f"timings of each candidate (default {repeats})"
        )
        add_device(subject)
        if name != "suite":
            subject.add_argument("--json", metavar="FILE", help="also write all measurements to this file")


def _add_op(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="OP", choices=sorted(OPS), help=f"one of {', '.join(sorted(OPS))}")
    parser.add_argument("--shape", help=f"of x (default {'x'.join(map(str, _OP_SHAPE))})")
    parser.add_argument("--dropout", type=float, help="probability of dropping (default 0.1)")
    parser.add_argument("--activation", help="of an op that has one (default gelu; silu for gated_activation)")
    _add_candidates(parser)
    parser.add_argument("--overhead", action="store_true", help="what a call costs the host, beside plain PyTorch")
    parser.add_argument("--parts", action="store_true", help="an op with dropout: its mask and the rest, forward")


def _add_model(parser: argparse.ArgumentParser) -> None:
    name = parser.add_argument("name", metavar="MODEL", help="of the configs, as gpt_nano: `fuselayers list model`")
    name.completer = lambda **_: choices("model")  # type: ignore[attr-defined]
    add_overrides(parser, nargs="*", metavar="OVERRIDE", help="of the model's config: feedforward=mlp")
    parser.add_argument("--shape", help="of a batch: sequences x tokens, as 4x128, or images, as 4")
    parser.add_argument("--dropout", type=float, help="probability of dropping (default: the config's)")
    _add_candidates(parser)
    add_imports(parser)


def _add_candidates(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=_DTYPES, metavar="DTYPE", default="float32", help=f"{', '.join(_DTYPES)} (default float32)"
    )
    parser.add_argument("--backends", help=f"comma-separated (default {', '.join(_DEFAULT_BACKENDS)})")


def _add_suite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to write")
    parser.add_argument("--ops", help="comma-separated (default all, and models)")
    parser.add_argument("--dtypes", help="comma-separated (default bfloat16,float16,float32; float32 on a CPU)")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"no new measurement begins later (default {MINUTES:g})"
    )
    parser.add_argument("--quick", action="store_true", help="one shape, no models")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Check, time and print.

    Returns:
        The exit code: 0, or 1 when a candidate's numbers are wrong.

    Raises:
        ValueError: a wrong argument; the text lists the possible ones.
    """
    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {arguments.repeats}")
    device = choose_device(arguments.device, setting="--device")
    if arguments.subject == "suite":
        return run_suite(arguments, console, device=device)
    if arguments.subject == "model":
        return _run_subject(arguments, console, device=device)
    if arguments.overhead and arguments.parts:
        raise ValueError("--overhead and --parts are two measurements; ask for one")
    if arguments.parts and arguments.backends is not None:
        raise ValueError("--parts times the op as it is called; leave --backends out")
    if arguments.overhead:
        return _run_overhead(arguments, console, device=device)
    if arguments.parts:
        return _run_parts(arguments, console, device=device)
    return _run_subject(arguments, console, device=device)


def _run_parts(arguments: argparse.Namespace, console: Console, *, device: torch.device) -> int:
    settings = _settings(arguments, shape=_OP_SHAPE, device=device)
    if not settings.dropout:
        raise ValueError(f"--parts needs an op that drops; pass --dropout 0.1, got {settings.dropout:g}")
    dropping, still = (op_case(arguments.name, one) for one in (settings, replace(settings, dropout=0.0)))
    if dropping.options == still.options:
        raise ValueError(f"--parts needs an op with dropout; {arguments.name} has none")
    x = dropping.tensors["x"].detach()
    seed = draw_seed(device=device)
    steps = {
        "the op": op_candidate(OURS, dropping, dropping.op).call,
        "its mask": partial(keep_factors, seed, x.shape, None, 0, p=settings.dropout),
        "without dropout": op_candidate(OURS, still, still.op).call,
        "a copy of x": x.clone,
    }
    with torch.no_grad():
        times = time_in_turns(
            {name: Step(lambda _, run=run: run()) for name, run in steps.items()},  # type: ignore[misc]
            device=device,
            rounds=arguments.repeats,
            warm_up=3,
            cold=True,
        )
    title = f"{arguments.name} of {'x'.join(map(str, settings.shape))} {dtype_name(settings.dtype)}, forward"
    machine = measured_machine(device)
    medians = median_seconds(times)
    say(console, f"{title}, dropout {settings.dropout:g}", machine)
    rows = [
        {"": name, "ms": f"{seconds * 1e3:.3f}", "ns per element": f"{seconds / x.numel() * 1e9:.3f}"}
        for name, seconds in medians.items()
    ]
    print_table(console, rows)
    say(console, f"medians of {arguments.repeats} in turns")
    _write_json(arguments.json, subject=title, machine=machine, seconds=times)
    return 0


def _run_overhead(arguments: argparse.Namespace, console: Console, *, device: torch.device) -> int:
    settings = _settings(arguments, shape=_SMALL_SHAPE, device=device)
    case = op_case(arguments.name, settings)
    candidates = [op_candidate(PLAIN, case, case.plain), op_candidate(OURS, case, case.op)]
    timings = host_times(candidates, repeats=arguments.repeats, device=device)
    machine = measured_machine(device)
    title = f"{arguments.name} of {'x'.join(map(str, settings.shape))} {dtype_name(settings.dtype)}"
    seconds = {
        candidate.name: {"forward": timing.forward, "forward + backward": timing.both}
        for candidate, timing in zip(candidates, timings, strict=True)
    }
    rows = []
    for span, readings in seconds[OURS].items():
        us, plain_us = (statistics.median(one) * 1e6 for one in (readings, seconds[PLAIN][span]))
        rows.append({"": span, "us": f"{us:.1f}", "plain us": f"{plain_us:.1f}", "us / plain": f"{us / plain_us:.2f}"})
    say(console, f"{title}, host time of a call", machine)
    print_table(console, rows)
    say(console, f"medians of {arguments.repeats} in turns, one thread; plain: eager PyTorch without this library")
    _write_json(arguments.json, subject=title, machine=machine, seconds=seconds)
    return 0


def _run_subject(arguments: argparse.Namespace, console: Console, *, device: torch.device) -> int:
    chosen = _backends(arguments.backends, device=device)
    if arguments.subject == "model":
        shape = None if arguments.shape is None else _shape(arguments.shape)
        dtype, overrides = _DTYPES[arguments.dtype], tuple(arguments.overrides)
        model = ModelCall(arguments.name, overrides, shape, arguments.dropout, dtype, device)
        subject = model_subject(model, backends=chosen)
    else:
        subject = op_subject(arguments.name, _settings(arguments, shape=_OP_SHAPE, device=device), backends=chosen)
    machine = measured_machine(device)
    wrong = [f"{name} is not timed, its numbers are wrong: {reason}" for name, reason in subject.wrong.items()]
    say(console, subject.title, machine, *wrong)
    timings = time_interleaved(subject.candidates, repeats=arguments.repeats, device=device)
    first = {}
    if arguments.subject == "model":
        with console.status("first steps, in processes of their own"):
            for name in chosen:
                if name != EAGER and name not in subject.wrong:
                    first[name] = first_steps(model, name, imports=arguments.imports)
    rows = _timing_rows(subject.candidates, timings)
    for row in rows if first else ():
        row[_FIRST_STEP] = "{:.1f} / {:.1f} s".format(*first[row[""]]) if row[""] in first else "-"
    print_table(console, rows)
    say(
        console,
        f"medians of {arguments.repeats} in turns, +- half the distance of the quartiles",
        "fwd: forward; both: forward + backward; x: times as fast as plain",
        "plain: eager PyTorch without this library; torch.compile: of that",
        "eager: our layers or formula, not fused; others: ours, fused by that backend",
        *(
            [f"{_FIRST_STEP}: forward + backward in a new process, with an empty compile cache and with its own"]
            if first
            else []
        ),
    )
    seconds = {
        candidate.name: {"forward": timing.forward, "forward_backward": timing.both}
        for candidate, timing in zip(subject.candidates, timings, strict=True)
    }
    content = {"seconds": seconds, "wrong": subject.wrong} | ({"first_step": first} if first else {})
    _write_json(arguments.json, subject=subject.title, machine=machine, **content)
    return int(bool(subject.wrong))


def _settings(arguments: argparse.Namespace, *, shape: tuple[int, ...], device: torch.device) -> Settings:
    return Settings(
        shape=shape if arguments.shape is None else _shape(arguments.shape),
        dropout=0.1 if arguments.dropout is None else arguments.dropout,
        activation=arguments.activation or ("silu" if arguments.name == "gated_activation" else "gelu"),
        dtype=_DTYPES[arguments.dtype],
        device=device,
    )


def _backends(text: str | None, *, device: torch.device) -> list[str]:
    """The backends to time; an explicit one that is missing is an error, not a silent fallback."""
    statuses = {status.name: status for status in backends(device=device)}
    # torch.compile needs what our Inductor backend needs.
    statuses[COMPILE] = replace(statuses["inductor"], name=COMPILE)
    if text is None:
        return [name for name in _DEFAULT_BACKENDS if statuses[name].available]
    chosen = chosen_names("backend", text, statuses)
    for name in chosen:
        if not statuses[name].available:
            raise ValueError(f"backend {name!r} is not available: {statuses[name].reason}; {statuses[name].hint}")
    return chosen


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"--shape must be sizes above 0 with x between them, as 8x256x512, got {shown(text)}")
    return tuple(int(size) for size in sizes)


def _timing_rows(candidates: Sequence[Candidate], timings: Sequence[Timing]) -> list[dict[str, str]]:
    rows = []
    for candidate, timing in zip(candidates, timings, strict=True):
        row = {"": candidate.name}
        for span, mine, first in (
            ("fwd", timing.forward, timings[0].forward),
            ("both", timing.both, timings[0].both),
        ):
            median = statistics.median(mine)
            row[f"{span} ms"] = f"{median * 1e3:.3f}"
            row[f"{span} +-"] = f"{spread(mine):.0%}"
            row[f"{span} x"] = f"{statistics.median(first) / median:.2f} x"
        rows.append(row)
    return rows


def _write_json(path: str | None, **content: Any) -> None:
    if path is not None:
        write_text(Path(path), json.dumps({"date": date.today().isoformat(), **content}, indent=2) + "\n")
