"""Text tables, and figures as text. The reports and commands use this file; it imports nothing that imports torch."""

import itertools
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from types import MappingProxyType
from typing import Final

_SCALES: Final = MappingProxyType({"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})

Row = tuple[str, ...]


_TEXT: Final = 30
"""Longer cells are sentences, and wrapped first; a column is not made narrower than this."""


def table_lines(rows: Sequence[Row], width: int | None, *, left: Collection[int]) -> Iterator[str]:
    """Yield the lines of a table, with a space of two between columns. No cell is cut, and no line is too long.

    If the columns do not fit into `width`, sentences in the last column are wrapped, beside the others or below them.
    Then the widest columns that are aligned to the left are wrapped. If numbers alone are too wide, a second table has
    the rest of the columns, with the first column again.

    Args:
        rows: the headings first.
        width: None for any.
        left: the columns that are aligned to the left.
    """
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [""] * len(rows)
    if width is not None and _total(sizes) > width:
        last = len(sizes) - 1
        room = width - _total(sizes[:-1]) - 2
        if last in left and sizes[-1] > _TEXT and room >= _TEXT:
            sizes[-1] = room
        elif last in left and sizes[-1] > _TEXT:
            texts = [row[-1] for row in rows]
            rows, sizes = [row[:-1] for row in rows], sizes[:-1]
        _shrink(sizes, width, left)
        if _total(sizes) > width and len(sizes) > 2 and not any(texts):
            yield from _in_two(rows, sizes, width, left)
            return
    for row, text in zip(rows, texts, strict=True):
        cells = [
            _wrapped_cell(cell, size, indent=2 * (column < len(sizes) - 1))
            for column, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            aligned = [
                part.ljust(size) if column in left else part.rjust(size)
                for column, (part, size) in enumerate(zip(parts, sizes, strict=True))
            ]
            yield "  ".join(aligned).rstrip()
        if text and width is not None:
            yield from wrapped(f"    {text}", width, indent=0)


def wrapped(line: str, width: int, *, indent: int = 4) -> list[str]:
    """Return a line of text as lines of at most `width`. Those after the first are indented by `indent` more.

    Words are not broken, so that paths and commands can be copied.

    >>> wrapped("  to continue: fuselayers train", 20)
    ['  to continue:', '      fuselayers', '      train']
    """
    if len(line) <= width:
        return [line]
    start = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=start + " " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _total(sizes: Sequence[int]) -> int:
    return sum(sizes) + 2 * (len(sizes) - 1)


def _shrink(sizes: list[int], width: int, left: Collection[int]) -> None:
    """Make the widest columns among `left` narrower until all columns fit, or none is wider than a short text."""
    while _total(sizes) > width:
        widest = max((column for column in left if column < len(sizes)), key=lambda column: sizes[column], default=0)
        if sizes[widest] <= _TEXT or widest not in left:
            return
        sizes[widest] = max(_TEXT, sizes[widest] - (_total(sizes) - width))


def _in_two(rows: Sequence[Row], sizes: Sequence[int], width: int, left: Collection[int]) -> Iterator[str]:
    """Yield the lines of two tables: the first columns, as many as fit, and the first one with the rest."""
    fits = max([count for count in range(2, len(sizes)) if _total(sizes[:count]) <= width], default=2)
    yield from table_lines([row[:fits] for row in rows], width, left=left)
    yield ""
    moved = {0, *(column - fits + 1 for column in left if column >= fits)} if 0 in left else set[int]()
    yield from table_lines([(row[0], *row[fits:]) for row in rows], width, left=moved)


def _wrapped_cell(cell: str, size: int, *, indent: int) -> list[str]:
    if len(cell) <= size:
        return [cell]
    return textwrap.wrap(cell, size, subsequent_indent=" " * indent, break_on_hyphens=False)


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
