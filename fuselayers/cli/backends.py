"""`fuselayers backends`: the backends of the fusion core, and how to install missing ones."""

import argparse

from rich.console import Console
from rich.table import Table

from ..partition import backends
from .machine import choose_device

SUMMARY = "show which backends can be used here"
DESCRIPTION = "Shows each backend of the fusion core: whether it works on this machine, why, and how to install it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the device."""
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto: a GPU when there is one)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print a table of backends."""
    table = Table(box=None, pad_edge=False)
    for heading in ("backend", "available", "why", "to install what is missing"):
        table.add_column(heading, overflow="fold")
    for status in backends(device=choose_device(arguments.device, setting="--device")):
        table.add_row(status.name, "yes" if status.available else "no", status.reason, status.hint)
    console.print(table, highlight=False)
    return 0
