"""`fuselayers bench`: checks and times an op, a model, or all of them, against eager PyTorch."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

from ..._version import __version__
from ...errors import in_one_line
from ...partition import backends
from ..example import sizes_of
from ..files import write_text
from ..machine import choose_device, measured_machine
from ..parser import add_device, add_imports
from ..text import chosen_names, complain, print_table, say
from .cases import OPS, Settings
from .first_step import first_steps
from .measure import COMPILE, Measured, copy_bandwidth, measure
from .report import FIRST_STEP_NOTE, NOTES, Report, table
from .subjects import EAGER, ModelCall, model_subject, op_subject
from .suite import jobs_of, run_suite

DESCRIPTION = """\
Checks that the numbers agree with eager PyTorch, then times. All candidates run in one process, in turns, after a
warm-up; tables show medians. Candidates with wrong numbers are not timed.

  fuselayers bench op bias_activation_dropout
  fuselayers bench model gpt_nano feedforward=mlp
  fuselayers bench suite --out results/"""
_OP = """\
Times one op: its formula in plain eager PyTorch, the same in torch.compile, the op, and the op fused on each backend.

  fuselayers bench op bias_activation_dropout
  fuselayers bench op layer_norm --shape 4x1025x768 --dtype bfloat16"""
_MODEL = """\
Times one model of the configs: plain eager PyTorch without this library, the same in torch.compile and fused on each
backend, and this library's layers on each backend; "eager" does not fuse them. The last column is the time of the first
step: forward and backward in a new process, with an empty compile cache and with a filled one.

  fuselayers bench model gpt_nano feedforward=mlp --shape 16x128
  fuselayers bench model llama_tiny --dropout 0 --json result.json"""
_SUITE = """\
Measures every op in several shapes, dtypes and options, and whole models, against eager PyTorch and torch.compile.
Writes a folder with the numbers and a table.

  fuselayers bench suite --out results/
  fuselayers bench suite --out results/ --ops layer_norm,rms_norm"""

_DTYPES: Final = ("float32", "float64", "bfloat16", "float16")
_REPEATS: Final = 30
_OP_SHAPE: Final = (8, 256, 512)
_DEFAULT: Final = {"op": ("inductor",), "model": (EAGER, "inductor")}


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
        subject.add_argument(
            "--repeats", type=int, default=_REPEATS, help=f"timings of each candidate (default {_REPEATS})"
        )
        add_device(subject)


def _add_op(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="OP", choices=sorted(OPS), help=f"one of {', '.join(sorted(OPS))}")
    parser.add_argument("--shape", help=f"shape of x (default {'x'.join(map(str, _OP_SHAPE))})")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout probability (default 0.1)")
    parser.add_argument("--activation", help="for ops that have one (default gelu; silu for gated_activation)")
    _add_candidates(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="MODEL", help="a model of the configs; `fuselayers list model` shows them")
    # Without a default argparse says that overrides are required.
    help_text = "an override of the model's config: feedforward=mlp"
    parser.add_argument("overrides", nargs="*", default=[], metavar="OVERRIDE", help=help_text)
    parser.add_argument("--shape", help="a batch: sequences x tokens (4x128), or a number of images (4)")
    parser.add_argument("--dropout", type=float, help="dropout probability (default: the config's)")
    _add_candidates(parser)
    add_imports(parser)


def _add_candidates(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=_DTYPES, metavar="DTYPE", default="float32", help=f"{', '.join(_DTYPES)} (default float32)"
    )
    parser.add_argument("--backends", help="comma-separated (default inductor; for a model eager too)")
    parser.add_argument("--json", metavar="FILE", help="also write all measurements to this file")


def _add_suite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to write")
    parser.add_argument("--ops", help="comma-separated (default all ops, and the models)")
    parser.add_argument("--dtypes", help="comma-separated (default bfloat16,float16,float32; float32 on a CPU)")
    parser.add_argument("--quick", action="store_true", help="one small shape, no models")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Check, time and print.

    Returns:
        The exit code: 0, or 1 when a candidate's numbers are wrong or it raised an error.

    Raises:
        ValueError: a wrong argument; the text lists the possible ones.
    """
    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {arguments.repeats}")
    device = choose_device(arguments.device, setting="--device")
    report = Report(
        machine=f"{measured_machine(device)}, {_versions()}",
        date=date.today().isoformat(),
        repeats=arguments.repeats,
        bandwidth=copy_bandwidth(device),
    )
    if arguments.subject == "suite":
        jobs = jobs_of(arguments.ops, arguments.dtypes, quick=arguments.quick, device=device)
        return run_suite(jobs, report, folder=Path(arguments.out), device=device, console=console)
    chosen = _backends(arguments.backends, default=_DEFAULT[arguments.subject], device=device)
    shape = None if arguments.shape is None else sizes_of(arguments.shape, option="--shape")
    dtype, call = getattr(torch, arguments.dtype), None
    if arguments.subject == "model":
        call = ModelCall(arguments.name, tuple(arguments.overrides), shape, arguments.dropout, dtype, device)
        subject = model_subject(call, backends=chosen)
    else:
        activation = arguments.activation or ("silu" if arguments.name == "gated_activation" else "gelu")
        settings = Settings(shape or _OP_SHAPE, dtype, device, dropout=arguments.dropout, activation=activation)
        subject = op_subject(arguments.name, settings, backends=chosen)
    report.failed |= subject.wrong
    wrong = [f"{name} is not timed: {reason}" for name, reason in subject.wrong.items()]
    say(console, f"{subject.title}, {subject.dtype}, {'x'.join(map(str, subject.shape))}", report.machine, *wrong)
    report.rows += measure(subject, repeats=arguments.repeats, device=device)
    if call is not None:
        compiled = {COMPILE, *chosen} - {EAGER}
        say(console, f"first steps in new processes: {', '.join(sorted(compiled))}")
        report.rows = [
            _with_first_step(row, call, arguments) if row.candidate in compiled else row for row in report.rows
        ]
    print_table(console, table(report.rows, bandwidth=report.bandwidth))
    say(console, f"medians of {arguments.repeats} in turns", *NOTES, *([] if call is None else [FIRST_STEP_NOTE]))
    if arguments.json:
        write_text(Path(arguments.json), json.dumps(asdict(report), indent=2) + "\n")
    return int(bool(subject.wrong))


def _with_first_step(row: Measured, call: ModelCall, arguments: argparse.Namespace) -> Measured:
    try:
        return replace(row, first_step=first_steps(call, row.candidate, imports=arguments.imports))
    except Exception as error:  # the new process failed; the measurements so far stay
        complain(f"{row.candidate} has no first step: {in_one_line(error)}")
        return row


def _backends(text: str | None, default: Sequence[str], *, device: torch.device) -> list[str]:
    """The backends to time, without "auto", which takes one of the others."""
    statuses = {status.name: status for status in backends(device=device) if status.name != "auto"}
    if text is None:
        return [name for name in default if statuses[name].available]
    chosen = chosen_names("backend", text, statuses)
    for name in chosen:
        if not statuses[name].available:
            raise ValueError(f"backend {name!r} is not available: {statuses[name].reason}; {statuses[name].hint}")
    return chosen


def _versions() -> str:
    """The versions, besides torch's, that affect the speed of kernels."""
    try:
        return f"fuselayers {__version__}, triton {metadata.version('triton')}"
    except metadata.PackageNotFoundError:
        return f"fuselayers {__version__}"
