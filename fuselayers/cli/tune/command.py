"""`fuselayers tune`: what it is asked for, and what it says at the end."""

import argparse
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from ..bench.cases import dtype_name
from ..machine import choose_device, measured_machine
from .choices import Row, frozen, tune_model, tune_ops
from .prices import tune_prices

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY = "measure this machine, or which backend serves a model or the ops best"
DESCRIPTION = """\
Without an argument it measures how fast this machine moves memory, multiplies matrices, does elementwise arithmetic and
starts a kernel, and keeps the figures for the fusion core, which weighs saving a value against computing it again by
them.

With a model or `ops` it measures ahead of time what the backend `auto` would find out while it runs: which candidate
serves each fused function best, forward alone and in training. What is chosen is then timed against eager in turns, as
it will be called: 31 or more, for three seconds or more, and then as many as these show are needed to know the ratio to
about a percent; a minute at most, or eleven turns where those take longer. If it is more than two percent slower, every
candidate is timed so, and the best is chosen (again). For a model it prints the override that makes the choice part of
a config.

  fuselayers tune
  fuselayers tune --device cuda --dry-run
  fuselayers tune model=gpt_nano feedforward=fused_mlp --batch 8
  fuselayers tune ops --shape 8x256x512 --shape 8x512x1024"""

_OPS: Final = "ops"
_SHAPES: Final = ("8x256x512", "8x512x1024")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, and whether to keep it."""
    parser.add_argument("items", nargs="*", metavar="ops | OVERRIDE", help="ops; or key=value of a config, as for list")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto: a GPU when there is one)")
    parser.add_argument("--batch", type=int, help="with a model: examples at once (default: train.batch_size)")
    parser.add_argument(
        "--shape", action="append", help=f"with ops: of x, may be repeated (default {' '.join(_SHAPES)})"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="with ops")
    parser.add_argument("--dropout", type=float, default=0.1, help="with ops (default 0.1)")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, keep nothing")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, print, and keep.

    Raises:
        ValueError: items that are neither `ops` nor overrides, an option that does not go with them, or a model in
            which nothing is fused.
    """
    device = choose_device(arguments.device, setting="--device")
    items: list[str] = arguments.items
    keep = not arguments.dry_run
    overrides = [item for item in items if "=" in item]
    if overrides != items and items != [_OPS]:
        raise ValueError(f"tune takes ops, or overrides such as model=gpt_nano, got {' '.join(items)}")
    if arguments.batch is not None and (not overrides or arguments.batch < 1):
        raise ValueError(f"--batch is a number of examples from 1 on, for a model, got {arguments.batch}")
    if arguments.shape and items != [_OPS]:
        raise ValueError("--shape goes with ops: fuselayers tune ops --shape 8x256x512")
    machine = measured_machine(device) if items else ""

    def say(row: Row) -> None:
        # A line and no animation, whose thread would run beside what is timed.
        console.print(f"{row.function}, {row.use}: {_chosen(row)}, {row.ratio}", highlight=False, soft_wrap=True)

    if not items:
        tune_prices(device, keep=keep, console=console)
    elif overrides:
        rows = tune_model(overrides, batch_size=arguments.batch, device=device, keep=keep, say=say)
        _print(rows, console, machine)
        console.print(
            f"to have the same choice in every run: fusion.backend={frozen(rows, device.type)}",
            highlight=False,
            soft_wrap=True,
        )
    else:
        dtype: torch.dtype = getattr(torch, arguments.dtype)
        shapes = [_shape(text) for text in arguments.shape or _SHAPES]
        rows = tune_ops(shapes, dtype=dtype, dropout=arguments.dropout, device=device, keep=keep, say=say)
        console.print(f"ops in {dtype_name(dtype)}, dropout {arguments.dropout}", highlight=False)
        _print(rows, console, machine)
    if not keep:
        console.print("nothing kept (--dry-run)", highlight=False)
    return 0


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split("x"))
        if min(shape) < 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"--shape must be sizes from 1 on, as in 8x256x512, got {text!r}") from None
    return shape


def _chosen(row: Row) -> str:
    return f"{row.chosen} (again)" if row.again else row.chosen


def _print(rows: list[Row], console: Console, machine: str) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("function", "use"):
        table.add_column(heading, overflow="fold")
    names = list(dict.fromkeys(name for row in rows for name in row.seconds))
    for heading in (*(f"{name}, ms" for name in names), "chosen", "against eager"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = (f"{1e3 * row.seconds[name]:.3f}" if name in row.seconds else "" for name in names)
        ratio = "" if row.ratio is None else str(row.ratio)
        table.add_row(row.function, row.use, *cells, _chosen(row), ratio)
    console.print(table, highlight=False)
    console.print(
        "against eager: the time of the same function op by op, divided by that of what was chosen; medians, in turns, "
        "and their 95 % intervals, if no turn hangs on the one before it; ms: of a graph by itself, or, where it was "
        "chosen (again), in proportion to what the whole took with each candidate",
        highlight=False,
    )
    console.print(machine, highlight=False, soft_wrap=True)
