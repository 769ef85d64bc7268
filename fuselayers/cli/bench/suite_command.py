"""`fuselayers bench suite`: what of the suite is measured, and where it is written."""

import argparse
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

from ..._version import __version__
from ...names import no_such
from ..machine import describe_machine
from .suite import SHAPES, measure_suite, variants
from .suite_report import write_report

__all__ = ["run_suite"]

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_MINUTES: Final = 7.5
_QUICK: Final = ((8, 256, 512),)
# Eager dropout on a CPU takes 6 ns an element: the largest shapes would take minutes each.
_CPU_LARGEST: Final = 2 * 2048 * 2048


def run_suite(arguments: argparse.Namespace, console: Console, *, device: torch.device) -> int:
    """Measure, and write the folder.

    Returns:
        The exit code: 0, or 1 when a candidate of ours computes wrong numbers.

    Raises:
        ValueError: an argument that cannot be; the text says what can.
    """
    for option in ("name", "shape", "backends", "dropout", "activation", "only", "layers", "json"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"bench suite takes no {option}; see its --ops, --dtypes, --minutes, --quick and --out")
    if arguments.out is None:
        raise ValueError("bench suite needs a folder for what it measures: --out DIR")
    minutes = _MINUTES if arguments.minutes is None else arguments.minutes
    if not minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {minutes:g}")
    ops = list(dict.fromkeys(variant.op for variant in variants()))
    chosen = [variant for variant in variants() if variant.op in _chosen("op", arguments.ops, ops)]
    default = list(_DTYPES) if device.type == "cuda" else ["float32"]
    dtypes = default if arguments.dtypes is None else _chosen("dtype", arguments.dtypes, list(_DTYPES))
    shapes = [shape for shape in SHAPES if device.type == "cuda" or torch.Size(shape).numel() <= _CPU_LARGEST]
    folder = Path(arguments.out)
    # Before the work, so that a folder that cannot be written is not found out after it.
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").open("ab").close()

    machine = f"{describe_machine(device)}, fuselayers {__version__}"
    console.print(machine, highlight=False, markup=False, soft_wrap=True)
    suite = measure_suite(
        chosen,
        shapes=_QUICK if arguments.quick else shapes,
        dtypes=[_DTYPES[name] for name in dtypes],
        device=device,
        repeats=arguments.repeats,
        minutes=minutes,
        say=lambda text: console.print(text, highlight=False, markup=False),
    )
    files = write_report(folder, suite, machine=machine, date=date.today().isoformat(), repeats=arguments.repeats)
    for what, why in suite.wrong.items():
        console.print(f"not timed, the numbers are wrong: {what}: {why}", highlight=False, markup=False, soft_wrap=True)
    if suite.left_out:
        console.print(f"left out, since {minutes:g} minutes were over: {len(suite.left_out)}; see results.md")
    for path in files:
        console.print(str(path), highlight=False, markup=False, soft_wrap=True)
    return int(any(what.startswith("fuselayers") for what in suite.wrong))


def _chosen(kind: str, text: str | None, known: Sequence[str]) -> list[str]:
    if text is None:
        return list(known)
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(no_such(f"{kind} of bench suite", name, known))
    return names
