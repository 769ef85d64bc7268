"""`fuselayers train`: trains a byte-level language model on text."""

import argparse
import logging
import signal
import warnings
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console

from ...components.option import described
from ...configs import DataConfig, ParallelConfig, TrainConfig
from ...errors import MissingPackageError
from ...partition import FallbackWarning
from ..parser import add_imports
from ..text import complain, say
from .engine import ALONE, Processes, joined_processes
from .finish import finish
from .loop import reproducible, train_steps
from .plot import FILE_NAME, plot_loss
from .start import start_run

DESCRIPTION = """\
Trains a byte-level language model; by default a small one on the source of Python's standard library.

  fuselayers train                               the default: minutes on two cores
  fuselayers train feedforward=mlp fusion=off    plain eager layers
  fuselayers train llama_tiny                    another model
  fuselayers train data.path=notes/              other text: a file or a folder
  fuselayers train tiny.yaml train.steps=500     a config file, as `build` takes it
  fuselayers train train.resume=runs/<date>      continue from the last checkpoint
  fuselayers train train.resume=runs/<date>/checkpoints/step-000200    or from this one
  fuselayers train --import my_module feedforward=mine    a class of your own
  fuselayers train 'hydra.searchpath=[/my/configs]' model=mine    a group file
  torchrun --nproc-per-node 2 -m fuselayers train parallel=fsdp    over several processes

A run's folder holds the curve (metrics.csv, loss.png), the last checkpoints (checkpoints/step-<number>), config.yaml,
sample.txt, comparison.json, and run.lock, which keeps a second process out.
On Ctrl-C, SIGTERM or a closed terminal a run finishes its step, writes a checkpoint and says how to continue; the exit
code is 0 after SIGTERM, else 128 + the signal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the overrides of the config."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="MODEL | FILE | OVERRIDE",
        help="a model or a config file, then group=choice or section.option=value",
    )
    add_imports(parser)
    lines = ["what can be set:"]
    for section, schema in (("train", TrainConfig), ("data", DataConfig), ("parallel", ParallelConfig)):
        lines += [f"  {section + '.' + option.name:<26} {option.doc}" for option in described(schema).values()]
    parser.epilog = "\n".join([*lines, "", "`fuselayers list` shows the options of the model's parts."])


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Train as the command line says, over the processes of torchrun if it started this one; see `train`."""
    with joined_processes() as group:
        if not group.is_main:  # it would print the same
            logging.getLogger("fuselayers").setLevel(logging.ERROR)
            warnings.simplefilter("ignore", FallbackWarning)
            console = Console(quiet=True)
        return train(arguments.overrides, console=console, imports=arguments.imports, processes=group)


def train(
    overrides: Sequence[str], *, console: Console, imports: Sequence[str] = (), processes: Processes = ALONE
) -> int:
    """Train a model, or continue a run.

    A resumed run takes the config of its checkpoint, with the overrides on top, and writes to the same folder.

    Args:
        overrides: of the config, as Hydra reads them: "model=gpt_nano", "train.steps=200".
        imports: modules of `--import`, which the hint for resuming repeats.
        processes: those of the run, which all call this. Rank 0 prints and writes.

    Returns:
        The exit code: 0, also after SIGTERM, or 128 + the number of another signal that stopped the run.

    Raises:
        ValueError: a wrong override, path, text or checkpoint; the text says what to change.
        OSError: a file cannot be read or written, or another process has the run's folder.
    """
    with ExitStack() as stack:
        run = start_run(overrides, console=console, stack=stack, processes=processes)
        stack.enter_context(reproducible(run.trainer.device))
        step, signal_number = train_steps(run, console)
        if processes.is_main:
            title = f"{run.config.model.name}, {run.config.feedforward.name}"
            try:
                plot_loss(run.folder / FILE_NAME, run.metrics.rows, title=title)
            except MissingPackageError as error:
                complain(f"no {FILE_NAME}: {error}")
        if signal_number is not None:
            command = "torchrun ... -m fuselayers" if processes.launched else "fuselayers"
            again = "".join(f"--import {module} " for module in imports)
            say(console, f"stopped after step {step}; to continue: {command} train {again}train.resume={run.folder}")
            # A scheduler sends SIGTERM to take a machine back; a supervisor need not restart the run as failed.
            return 0 if signal_number == signal.SIGTERM else 128 + signal_number
        finish(run, console)
    return 0
