"""Text tables, and figures as text. The reports and commands use this file; it imports nothing that imports torch."""

import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from types import MappingProxyType
from typing import Final

_SCALES: Final = MappingProxyType({"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})

Row = tuple[str, ...]


def table_lines(rows: Sequence[Row], width: int | None, *, left: Collection[int]) -> Iterator[str]:
    """Yield the lines of a table, with a space of two between columns. No cell is cut.

    `left` holds the columns that are aligned to the left. If the columns do not fit into `width` and the last one is
    among `left`, its text goes below each row, wrapped.
    """
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(sizes) - 1
    below = width is not None and sum(sizes) + 2 * last > width and last in left
    for row in rows:
        aligned = [
            cell.ljust(size) if column in left else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ]
        yield "  ".join(aligned[:last] if below else aligned).rstrip()
        if width is not None and below:
            indent = 4 * " "
            yield from textwrap.wrap(
                row[-1], width, initial_indent=indent, subsequent_indent=indent, break_long_words=False
            )


def readable_bytes(size: float) -> str:
    """Return a size in bytes as text.

    >>> readable_bytes(12_582_912), readable_bytes(8)
    ('12.6 MB', '8 B')
    """
    return amount(size, "B")


def amount(value: float, unit: str) -> str:
    """Return a number with its unit, in thousands, millions and so on.

    >>> amount(1.5e9, "FLOP"), amount(999_970_000, "B"), amount(12, "FLOP")
    ('1.5 GFLOP', '1.0 GB', '12 FLOP')
    """
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.99995 * scale:  # a value that rounds to 1,000 of a unit is 1 of the next
            return f"{value / scale:,.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def bytes_of(text: str) -> int:
    """Return the bytes of a size as text.

    Raises:
        ValueError: the text is not a number with a unit.

    >>> bytes_of("2 GB"), bytes_of("12.5kB")
    (2000000000, 12500)
    """
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(\w+)", text.strip())
    if parts is None or parts[2] not in _SCALES:
        raise ValueError(f"a size is a number and one of {', '.join(_SCALES)}, such as '2 GB', got {text!r}")
    return round(float(parts[1]) * _SCALES[parts[2]])
