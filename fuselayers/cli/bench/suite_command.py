"""`fuselayers bench suite`: measures ops and whole models, and writes a folder."""

import argparse
import os
import time
from collections.abc import Sequence
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

from ..._version import __version__
from ..machine import measured_machine
from ..text import chosen_names, say
from .ahead import compile_ahead
from .measure import OURS
from .suite import SHAPES, Round, Suite, calls_ahead, measure_suite, variants
from .suite_models import OWN_MODELS, measure_models, model_calls_ahead, models_on
from .suite_report import write_data, write_report

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MINUTES: Final = 12.0
# The share of the minutes; the models also get those that the ops leave.
_SHARE_OF_MODELS: Final = 1 / 3
# Each holds a context and tensors of the largest shape on the GPU.
_WORKERS: Final = 16
_QUICK: Final = ((8, 256, 512),)
# Eager dropout on a CPU takes 6 ns an element: the larger shapes of SHAPES would take minutes each.
_ON_A_CPU: Final = ((8, 256, 1024), (8, 256, 512), (2, 2048, 2048))


def run_suite(arguments: argparse.Namespace, console: Console, *, device: torch.device) -> int:
    """Measure, and write the folder.

    Returns:
        The exit code: 0, or 1 when a candidate of ours computes wrong numbers.

    Raises:
        ValueError: a wrong argument; the text lists the possible ones.
    """
    minutes = arguments.minutes
    if not minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {minutes:g}")
    ops = chosen_names("op of bench suite", arguments.ops, dict.fromkeys(variant.op for variant in variants()))
    chosen = [variant for variant in variants() if variant.op in ops]
    # `--ops` measures those ops alone.
    models = list(models_on(device)) if arguments.ops is None and not arguments.quick else []
    default = None if device.type == "cuda" else "float32"
    dtypes = chosen_names("dtype of bench suite", arguments.dtypes or default, _DTYPES)
    shapes = SHAPES if device.type == "cuda" else _ON_A_CPU
    rounds = _rounds([_DTYPES[name] for name in dtypes], _QUICK if arguments.quick else shapes)
    folder = Path(arguments.out)
    # Before the work: a folder that cannot be written is an error at once.
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").open("ab").close()

    machine = ", ".join((measured_machine(device), *_versions()))
    today = date.today().isoformat()

    def keep(suite: Suite) -> None:
        write_data(folder, suite, machine=machine, date=today, repeats=arguments.repeats)

    say(console, machine)
    progress = partial(say, console)
    workers = min(len(os.sched_getaffinity(0)), _WORKERS)
    if device.type == "cuda":  # compiling takes one core longer than all measurements take the GPU
        # A model takes longest.
        ahead = [*model_calls_ahead(models, rounds[0].dtype, device), *calls_ahead(chosen, rounds, device)]
        compile_ahead(ahead, workers=workers, seconds=60 * minutes, say=progress)
    deadline = time.monotonic() + 60 * minutes
    suite = measure_suite(
        chosen,
        rounds=rounds,
        device=device,
        repeats=arguments.repeats,
        deadline=deadline - (60 * minutes * _SHARE_OF_MODELS if models else 0.0),
        say=progress,
        keep=keep,
    )
    measure_models(
        models,
        suite,
        dtype=rounds[0].dtype,
        device=device,
        repeats=arguments.repeats,
        deadline=deadline,
        say=progress,
        keep=keep,
    )
    files = write_report(folder, suite, machine=machine, date=today, repeats=arguments.repeats)
    lines = [f"not timed: {name}: {reason}" for name, reason in suite.failed.items()]
    if suite.left_out:
        lines.append(f"left out after {minutes:g} minutes: {len(suite.left_out)}; see results.md")
    say(console, *lines, *map(str, files))
    own = {OURS, *OWN_MODELS}
    return int(any(name.partition(":")[0] in own for name in suite.failed))


def _rounds(dtypes: Sequence[torch.dtype], shapes: tuple[tuple[int, ...], ...]) -> list[Round]:
    """The largest shape in each dtype, and the other shapes in the first one; the most important rounds come first."""
    rounds = [Round(dtype, shapes[:1], any_size=False) for dtype in dtypes]
    if len(shapes) > 1:
        rounds.insert(1, Round(dtypes[0], shapes[1:], any_size=True))
    return rounds


def _versions() -> list[str]:
    """Versions of other packages that decide the speed of kernels."""
    versions = [f"fuselayers {__version__}"]
    for name in ("triton", "liger_kernel"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return versions
