"""Reads lists of names and prints lines, errors and tables, for every command."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from rich.console import Console

from ..names import no_such
from ..text_table import table_lines, wrapped
from .torchrun import is_launched


def chosen_names(kind: str, text: str | None, known: Iterable[str]) -> list[str]:
    """Return the comma-separated names in `text`, without duplicates; all known names if it is None.

    Raises:
        ValueError: a name is not known.
    """
    known = list(known)
    names = known if text is None else list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(no_such(kind, name, known))
    return names


def say(console: Console, *lines: str, bold: bool = False, verbatim: bool = False) -> None:
    """Print lines of text, wrapped to the console's width, without colours or markup.

    With `verbatim` nothing is wrapped: for what a program reads, and for commands and paths to copy.
    """
    text = "\n".join(lines)
    if not verbatim:
        text = "\n".join(part for line in text.split("\n") for part in wrapped(line, console.width))
    console.print(text, style="bold" if bold else None, highlight=False, markup=False, soft_wrap=True)


def complain(text: str) -> None:
    """Print one line on stderr, if stderr is still open; with several processes the line names the rank."""
    rank = f", rank {os.environ['RANK']}" if is_launched() else ""
    with suppress(OSError):
        print(f"fuselayers{rank}: {text}", file=sys.stderr, flush=True)


def print_table(console: Console, rows: Sequence[Mapping[str, object]], *, left: int = 1) -> None:
    """Print a table with a column for each key of the first row.

    Args:
        rows: at least one.
        left: how many columns are aligned to the left.
    """
    headings = tuple(rows[0])
    cells = [headings, *(tuple(str(row[heading]) for heading in headings) for row in rows)]
    heading, *lines = table_lines(cells, console.width, left=range(left))
    say(console, heading, bold=True)
    say(console, *lines)
