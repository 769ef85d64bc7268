"""Reads lists of names and prints lines, errors and tables, for every command."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from rich.console import Console
from rich.table import Table

from ..names import no_such


def chosen_names(kind: str, text: str | None, known: Iterable[str]) -> list[str]:
    """Return the comma-separated names in `text`, without duplicates; all known names if it is None.

    Raises:
        ValueError: a name is not known.

    >>> chosen_names("op", "relu, gelu,relu", ["gelu", "relu", "silu"])
    ['relu', 'gelu']
    """
    known = list(known)
    names = known if text is None else list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(no_such(kind, name, known))
    return names


def say(console: Console, *lines: str) -> None:
    """Print lines as they are: no colours, no markup, no line breaks of rich."""
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def complain(text: str) -> None:
    """Print one line on stderr, if it can still be written."""
    with suppress(OSError):
        print(f"fuselayers: {text}", file=sys.stderr, flush=True)


def table_of(rows: Sequence[Mapping[str, object]], *, left: int = 1, title: str | None = None) -> Table:
    """A table with a column for each key of the first row.

    Args:
        rows: at least one.
        left: how many columns are aligned to the left.
        title: above the table.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, heading in enumerate(rows[0]):
        table.add_column(heading, justify="left" if place < left else "right", no_wrap=place < left)
    for row in rows:
        table.add_row(*(str(row[heading]) for heading in rows[0]))
    return table
