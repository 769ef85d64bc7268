"""`fuselayers backends`: the backends of the fusion core, and how to install missing ones."""

import argparse

from rich.console import Console

from ..partition import backends
from .machine import choose_device
from .parser import add_device
from .text import say

DESCRIPTION = "Shows each backend of the fusion core: whether it works on this machine, why, and how to install it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the device."""
    add_device(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print a line for each backend."""
    say(console, f"{'backend':<10}available  why", bold=True)
    for status in backends(device=choose_device(arguments.device, setting="--device")):
        hint = f"; to get it: {status.hint}" if status.hint else ""
        say(console, f"{status.name:<10}{'yes' if status.available else 'no':<11}{status.reason}{hint}")
    return 0
