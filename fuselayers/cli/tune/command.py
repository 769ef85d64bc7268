"""`fuselayers tune`: its arguments and its output."""

import argparse

from rich.console import Console

from ...configs.build import split_source
from ..machine import choose_device, measured_machine
from ..parser import add_device, add_imports
from ..text import print_table, say
from .prices import tune_prices
from .step import step_seconds

DESCRIPTION = """\
Without an argument, measures how fast this machine moves memory, multiplies matrices, does elementwise arithmetic and
starts a kernel. The fusion core uses these figures to weigh saving a value against recomputing it.

With a model, measures a training step of it on each backend that works here, and without fusion. Prints the times and
the override that pins the fastest in a config. The backend `auto` never measures: it takes Inductor where that works.

  fuselayers tune
  fuselayers tune --device cuda
  fuselayers tune gpt_nano feedforward=fused_mlp train.batch_size=8"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "overrides", nargs="*", metavar="MODEL | OVERRIDE", help="a model of the configs, then key=value"
    )
    add_device(parser)
    add_imports(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, print, and store.

    Raises:
        ValueError: an argument is no override, options do not fit together, or nothing in the model is fused.
    """
    device = choose_device(arguments.device, setting="--device")
    file, overrides = split_source(arguments.overrides)
    if file:
        raise ValueError(f"tune takes a model and overrides, such as gpt_nano norm=rms_norm, got the file {file}")
    if not overrides:
        tune_prices(device, console=console)
        return 0
    say(console, measured_machine(device))
    seconds = step_seconds(overrides, device=device)
    rows = [
        {
            "a training step with": override,
            "ms": f"{1e3 * taken:,.1f}",
            "speed": f"{seconds['fusion=off'] / taken:.2f} x",
        }
        for override, taken in seconds.items()
    ]
    print_table(console, rows)
    say(console, f"to pin the fastest: {min(seconds, key=lambda override: seconds[override])}")
    return 0
