"""`fuselayers tune`: its arguments and its output."""

import argparse

from rich.console import Console

from ...configs.sources import split_source
from ...partition.auto import fastest
from ..machine import choose_device, measured_machine
from ..parser import add_device, add_imports, add_overrides
from ..text import say
from .choices import Tuned, pinned, tune_model
from .prices import tune_prices

DESCRIPTION = """\
Without an argument, measures how fast this machine moves memory, multiplies matrices, does elementwise arithmetic and
starts a kernel. The fusion core uses these figures to weigh saving a value against recomputing it.

With a model, measures ahead of time what the backend `auto` would measure while the model runs: which backend is
fastest for each fused graph, forward alone and in training. Prints the times, the model's time against eager, and the
override that pins these choices in a config.

  fuselayers tune
  fuselayers tune --device cuda --dry-run
  fuselayers tune gpt_nano feedforward=fused_mlp --batch 8"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_overrides(parser, nargs="*", metavar="MODEL | OVERRIDE", help="a model of the configs, then key=value")
    add_device(parser)
    parser.add_argument("--batch", type=int, help="with a model: examples at once (default: train.batch_size)")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, store nothing")
    add_imports(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, print, and store.

    Raises:
        ValueError: an argument that is no override, an option that does not go with the others, or a model in which
            nothing is fused.
    """
    device = choose_device(arguments.device, setting="--device")
    file, overrides = split_source(arguments.overrides)
    keep = not arguments.dry_run
    if file:
        raise ValueError(f"tune takes a model and overrides, as gpt_nano norm=rms_norm, got the file {file}")
    if arguments.batch is not None and (not overrides or arguments.batch < 1):
        raise ValueError(f"--batch is a number of examples from 1 on, for a model, got {arguments.batch}")

    def show(tuned: Tuned) -> None:
        for name, seconds in tuned.graphs.items():
            times = ", ".join(f"{one} {1e3 * taken:.3g} ms" for one, taken in seconds.items() if taken is not None)
            say(console, f"{name}: {fastest(seconds)}: {times}")
        if not tuned.graphs:
            say(console, f"{tuned.use}: no graph was measured; the first backend stays")
        say(
            console,
            f"the model, {tuned.use}: eager {1e3 * tuned.eager:.3g} ms, fused {1e3 * tuned.fused:.3g} ms, "
            f"{tuned.eager / tuned.fused:.2f} x as fast",
        )

    if not overrides:
        tune_prices(device, keep=keep, console=console)
    else:
        say(console, measured_machine(device))
        tuned = tune_model(overrides, batch_size=arguments.batch, device=device, keep=keep, say=show)
        say(console, f"to pin these choices: fusion.backend={pinned(tuned, device.type)}")
    if not keep:
        say(console, "nothing stored (--dry-run)")
    return 0
