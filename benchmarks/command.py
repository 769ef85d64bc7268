"""Runs a developers' command: parses its arguments, and prints its errors in one line, as `fuselayers` does."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from fuselayers.cli.parser import Parser
from fuselayers.errors import BackendUnavailableError


def run_command(
    prog: str,
    description: str,
    add_arguments: Callable[[Any], None],
    run: Callable[[Any, Console], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse and run; returns the exit code, 2 for a wrong argument or a missing compiler."""
    parser = Parser(prog=prog, description=description)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv), Console(width=None if sys.stdout.isatty() else 120))
    except SystemExit as done:  # after --help, or after a wrong argument
        return int(done.code or 0)
    except (ValueError, OSError, BackendUnavailableError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
