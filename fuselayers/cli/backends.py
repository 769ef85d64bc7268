"""`fuselayers backends`: the backends of the fusion core, and how to install missing ones."""

import argparse

from rich.console import Console

from ..partition import backends
from .machine import choose_device
from .parser import add_device
from .text import print_table

DESCRIPTION = "Shows each backend of the fusion core: whether it works on this machine, why, and how to install it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the device."""
    add_device(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print a line for each backend."""
    rows = [
        {
            "backend": status.name,
            "available": "yes" if status.available else "no",
            "why": f"{status.reason}; to get it: {status.hint}" if status.hint else status.reason,
        }
        for status in backends(device=choose_device(arguments.device, setting="--device"))
    ]
    print_table(console, rows, left=3)
    return 0
