"""`fuselayers bench`: times an op, a model or the fusion core against eager PyTorch, once they agree."""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from ..._version import __version__
from ...names import no_such
from ...partition import backends, warm_up
from ..files import write_whole
from ..machine import choose_device, measured_machine
from .cases import OPS, Settings
from .measure import Candidate, Results, Timing, disagreement, results, spread, time_interleaved
from .partition import SECTIONS, Row, Setting, budget_note
from .subjects import COMPILE, Subject, model_subject, op_subject
from .suite_command import run_suite

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY = "time an op, a model, or the fusion core, against eager PyTorch"
DESCRIPTION = """\
Times one op or model: plain eager PyTorch as one would write it without this library, against the library's eager
form and each backend. All in one process, in turns, after warm-up; medians. What computes wrong numbers is not timed.
`partition` measures the fusion core instead: what is saved, memory against recompute, the time to cut a graph.

  fuselayers bench op bias_activation_dropout --dropout 0.1
  fuselayers bench op residual_layer_norm --shape 4x1025x768 --dtype bfloat16 --json result.json
  fuselayers bench model gpt_nano feedforward=mlp --shape 16x128
  fuselayers bench partition --only saved,budget --layers 4
  fuselayers bench partition --quick --json partition.json
  fuselayers bench suite --out results/

`suite` measures every op in many shapes, dtypes and options against eager PyTorch, torch.compile and, on a GPU,
Liger-Kernel where it is installed; it writes a folder with the numbers, a table and pictures."""

_DTYPES: Final = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SUBJECTS: Final = ("op", "model", "partition", "suite")
_WRONG: Final = 1
_LAYERS: Final = 4
_REPEATS: Final = 50
_SUITE_REPEATS: Final = 20
_OP_SHAPE: Final = (8, 256, 512)
_DEFAULT_BACKENDS: Final = ("eager", "inductor", COMPILE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to time, and how."""
    parser.add_argument(
        "subject", metavar="op | model | partition | suite", help="what NAME names; partition and suite have none"
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help=f"a model of the configs, or an op: {', '.join(sorted(OPS))}"
    )
    # argparse calls what may be left out required, unless it has a default.
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="OVERRIDE", help="of a model's config: feedforward=mlp"
    )
    parser.add_argument(
        "--shape", help="of an op's x: 8x256x512; of a model's batch: sequences x tokens, 4x128, or images, 4"
    )
    parser.add_argument("--dtype", default="float32", help=f"one of {', '.join(_DTYPES)} (default float32)")
    parser.add_argument("--backends", help=f"comma-separated (default {','.join(_DEFAULT_BACKENDS)})")
    parser.add_argument(
        "--repeats", type=int, help=f"how often each is timed (default {_REPEATS}, suite {_SUITE_REPEATS})"
    )
    parser.add_argument("--dropout", type=float, help="probability of dropping (default: 0, or a model's config)")
    parser.add_argument("--activation", help="of an op that has one (default gelu; silu for gated_activation)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto: a GPU when there is one)")
    parser.add_argument("--only", help=f"of partition: {','.join(SECTIONS)} (default all)")
    parser.add_argument("--layers", type=int, help=f"of partition: of the budget's model (default {_LAYERS})")
    parser.add_argument("--quick", action="store_true", help="smaller: of partition layers and depths, of suite shapes")
    parser.add_argument("--ops", help="of suite: comma-separated (default all)")
    parser.add_argument(
        "--dtypes", help="of suite: comma-separated (default bfloat16,float16,float32; float32 on a CPU)"
    )
    parser.add_argument("--minutes", type=float, help="of suite: after these nothing new is measured (default 7)")
    parser.add_argument("--out", metavar="DIR", help="of suite: the folder to write, made if it is not there")
    parser.add_argument("--json", metavar="FILE", help="also write all that was measured there")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Check, time and print.

    Returns:
        The exit code: 0, or 1 when a candidate's numbers are wrong, or a budget of ours costs more than torch's.

    Raises:
        ValueError: an argument that cannot be; the text says what can.
    """
    if arguments.subject not in _SUBJECTS:
        raise ValueError(no_such("subject of bench", arguments.subject, _SUBJECTS))
    if arguments.repeats is None:
        arguments.repeats = _SUITE_REPEATS if arguments.subject == "suite" else _REPEATS
    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {arguments.repeats}")
    if arguments.dtype not in _DTYPES:
        raise ValueError(no_such("dtype", arguments.dtype, _DTYPES))
    device = choose_device(arguments.device, setting="--device")
    if arguments.subject != "suite":
        for option in ("ops", "dtypes", "minutes", "out"):
            if getattr(arguments, option) is not None:
                raise ValueError(f"--{option} is for bench suite, not for bench {arguments.subject}")
    if arguments.subject == "partition":
        return _run_partition(arguments, console, device=device)
    if arguments.subject == "suite":
        return run_suite(arguments, console, device=device)
    for option in ("only", "layers", "quick"):
        if getattr(arguments, option):
            raise ValueError(f"--{option} is for bench partition, not for bench {arguments.subject}")
    if arguments.name is None:
        raise ValueError(f"bench {arguments.subject} needs a NAME; see fuselayers bench --help")
    chosen = _backends(arguments.backends, device=device)
    shape = None if arguments.shape is None else _shape(arguments.shape)
    subject = _subject(arguments, chosen=chosen, shape=shape, device=device)

    machine = measured_machine(device)
    console.print(f"{subject.title}\n{machine}", highlight=False, markup=False, soft_wrap=True)
    # The eager backend runs the formula; bench suite times what "auto" chooses.
    with warm_up(math.inf):
        right, wrong = _check(subject)
    for name, reason in wrong.items():
        console.print(f"{name} is not timed, its numbers are wrong: {reason}", highlight=False, soft_wrap=True)
    with warm_up(math.inf):
        timings = time_interleaved(right, repeats=arguments.repeats, device=device)
    if right:
        console.print(_table(right, timings), highlight=False)
        console.print(
            f"medians of {arguments.repeats} in turns, +- half the distance of the quartiles; ratio: how many times as "
            f"fast as {right[0].name}.\nplain: eager PyTorch without this library; eager: the library's eager form.",
            highlight=False,
            soft_wrap=True,
        )
    if arguments.json:
        _write_json(Path(arguments.json), subject, right, timings, wrong, machine=machine)
    return _WRONG if wrong else 0


def _run_partition(arguments: argparse.Namespace, console: Console, *, device: torch.device) -> int:
    options = ("name", "shape", "backends", "dropout", "activation")
    given = [name for name in options if getattr(arguments, name) is not None]
    if arguments.dtype != "float32":
        given.append("dtype")
    if given:
        raise ValueError(f"bench partition takes no {' and no '.join(given)}; see its --only, --layers and --quick")
    if arguments.layers is not None and arguments.layers < 1:
        raise ValueError(f"--layers must be at least 1, got {arguments.layers}")
    chosen = list(SECTIONS)
    if arguments.only is not None:
        chosen = list(dict.fromkeys(name.strip() for name in arguments.only.split(",")))
    for name in chosen:
        if name not in SECTIONS:
            raise ValueError(no_such("section of bench partition", name, SECTIONS))
    setting = Setting(device=device, repeats=arguments.repeats, num_layers=arguments.layers or _LAYERS)
    if arguments.quick:
        setting = replace(setting, depths=setting.depths[:2], hidden_dim=256)
    machine = f"{measured_machine(device)}, fuselayers {__version__}"
    console.print(machine, highlight=False, markup=False, soft_wrap=True)
    measured: dict[str, list[Row]] = {}
    for name in chosen:
        title, measure = SECTIONS[name]
        measured[name] = measure(setting)
        console.print(f"\n{title}", style="bold", highlight=False, markup=False, soft_wrap=True)
        console.print(_rows_table(measured[name]), highlight=False)
        if name == "budget":
            console.print(budget_note(measured[name]), highlight=False, markup=False, soft_wrap=True)
        for row in measured[name]:
            if row.get("wrong"):
                where = " ".join(str(row[key]) for key in ("layer", "dtype", "call", "form") if key in row)
                text = f"not timed, the numbers are wrong: {where}: {row['wrong']}"
                console.print(text, highlight=False, markup=False, soft_wrap=True)
    if arguments.json:
        content = {
            "machine": machine,
            "date": date.today().isoformat(),
            "repeats": setting.repeats,
            "sections": measured,
        }
        write_whole(Path(arguments.json), lambda file: file.write((json.dumps(content, indent=2) + "\n").encode()))
    bad = any(row.get("wrong") or row.get("lower") == "torch" for rows in measured.values() for row in rows)
    return _WRONG if bad else 0


def _rows_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    headings = [heading for heading in rows[0] if heading != "wrong"]
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*(str(row[heading]) for heading in headings))
    return table


def _subject(
    arguments: argparse.Namespace, *, chosen: Sequence[str], shape: tuple[int, ...] | None, device: torch.device
) -> Subject:
    dtype = _DTYPES[arguments.dtype]
    if arguments.subject == "model":
        if arguments.activation is not None:
            raise ValueError("--activation is for ops; a model's is in its config: feedforward.activation=relu")
        return model_subject(
            arguments.name,
            arguments.overrides,
            shape=shape,
            dropout=arguments.dropout,
            backends=chosen,
            dtype=dtype,
            device=device,
        )
    if arguments.overrides:
        raise ValueError(f"an op takes no overrides, got {' '.join(arguments.overrides)}")
    settings = Settings(
        shape=shape or _OP_SHAPE,
        dropout=arguments.dropout or 0.0,
        activation=arguments.activation or ("silu" if arguments.name == "gated_activation" else "gelu"),
        dtype=dtype,
        device=device,
    )
    return op_subject(arguments.name, settings, backends=chosen)


def _backends(text: str | None, *, device: torch.device) -> list[str]:
    """The backends to time; one that is asked for and missing is an error, not a silent fallback."""
    statuses = {status.name: status for status in backends(device=device)}
    # torch.compile needs what our Inductor backend needs.
    statuses[COMPILE] = replace(statuses["inductor"], name=COMPILE)
    if text is None:
        return [name for name in _DEFAULT_BACKENDS if statuses[name].available]
    chosen = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in chosen:
        if name not in statuses:
            raise ValueError(no_such("backend", name, statuses))
        if not statuses[name].available:
            raise ValueError(f"backend {name!r} is not available: {statuses[name].reason}; {statuses[name].hint}")
    return chosen


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"--shape must be sizes above 0 with x between them, as 8x256x512, got {text!r}")
    return tuple(int(size) for size in sizes)


def _check(subject: Subject) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates whose numbers are right, and what is wrong with the others."""
    known: dict[int, Results] = {}

    def of(candidate: Candidate) -> Results:
        if id(candidate) not in known:
            known[id(candidate)] = results(candidate)
        return known[id(candidate)]

    right, wrong = [], {}
    for check in subject.checks:
        reasons = [
            reason
            for proof in check.proofs
            if (reason := disagreement(of(proof.checked), eager=of(proof.eager), truth=of(proof.truth))) is not None
        ]
        if reasons:
            wrong[check.timed.name] = reasons[0]
        else:
            right.append(check.timed)
    return right, wrong


def _table(candidates: Sequence[Candidate], timings: Sequence[Timing]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading in ("forward ms", "+-", "ratio", "forward + backward ms", "+-", "ratio"):
        table.add_column(heading, justify="right")
    for candidate, timing in zip(candidates, timings, strict=True):
        cells = []
        for mine, first in ((timing.forward, timings[0].forward), (timing.both, timings[0].both)):
            median = statistics.median(mine)
            ratio = statistics.median(first) / median
            cells += [f"{median * 1e3:.3f}", f"{spread(mine):.0%}", f"{ratio:.2f} x"]
        table.add_row(candidate.name, *cells)
    return table


def _write_json(
    path: Path,
    subject: Subject,
    candidates: Sequence[Candidate],
    timings: Sequence[Timing],
    wrong: dict[str, str],
    *,
    machine: str,
) -> None:
    content = {
        "subject": subject.title,
        "machine": machine,
        "date": date.today().isoformat(),
        "seconds": {
            candidate.name: {"forward": timing.forward, "forward_backward": timing.both}
            for candidate, timing in zip(candidates, timings, strict=True)
        },
        "wrong": wrong,
    }
    text = json.dumps(content, indent=2) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))
