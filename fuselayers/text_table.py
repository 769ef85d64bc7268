"""Text tables, and figures as text. The reports and commands use this file; it imports nothing that imports torch."""

import itertools
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from types import MappingProxyType
from typing import Final

# A line may break after a space, or after a dot that is no decimal point. `whole` keeps a figure and its unit together.
_BREAK: Final = re.compile(r"(?<=\S )(?=\S)|(?<=[^\W\d]\.)(?=\w)|(?<=\d\.)(?=[^\W\d])")
_NO_BREAK: Final = "\N{NO-BREAK SPACE}"
_SCALES: Final = MappingProxyType({"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})

Row = str | tuple[str, ...]


def table_lines(rows: Sequence[Row], width: int | None, *, left: Collection[int]) -> Iterator[str]:
    """Yield the lines of a table. A cell that is too wide is wrapped between words, or after a dot in a name.

    A row that is a string fills a line. `left` holds the columns that are aligned to the left. If the columns do not
    fit and the last one is among `left`, its text goes below each row. If `width` is None, no cell is wrapped.
    """
    columns = [*zip(*(row for row in rows if isinstance(row, tuple)), strict=True)]
    natural = [max(map(len, column)) for column in columns]
    width = sum(natural) + 2 * (len(natural) - 1) if width is None else width
    widths = [max(len(line) for cell in column for line in _folded(cell, 0)) for column in columns]
    spare = width - sum(widths) - 2 * (len(widths) - 1)
    if spare < 0 and len(columns) - 1 in left:
        lines: list[Row] = []
        for row in rows:
            lines += [row] if isinstance(row, str) else [row[:-1], f"    {row[-1]}"]
        yield from table_lines(lines, width, left=left)
        return
    for _ in range(spare):
        # The narrowest column that is still wrapped gets one more character.
        wanting = [place for place, size in enumerate(widths) if size < natural[place]]
        if not wanting:
            break
        widths[min(wanting, key=widths.__getitem__)] += 1
    for row in rows:
        if isinstance(row, str):
            indent = row[: len(row) - len(row.lstrip())]
            yield from textwrap.wrap(row, width, subsequent_indent=indent, break_long_words=False)
            continue
        cells = [_folded(cell, size) for cell, size in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            aligned = (
                text.ljust(size) if column in left else text.rjust(size)
                for column, (text, size) in enumerate(zip(line, widths, strict=True))
            )
            yield "  ".join(aligned).rstrip().replace(_NO_BREAK, " ")


def _folded(cell: str, width: int) -> list[str]:
    """Return a cell as lines of at most `width`, or of its longest word."""
    text = cell.lstrip(" ")
    lines = [indent := cell[: len(cell) - len(text)]]
    for piece in _BREAK.split(text):
        if lines[-1] != indent and len(f"{lines[-1]}{piece}".rstrip(" ")) > width:
            lines.append(indent)
        lines[-1] += piece
    return [line.rstrip(" ") for line in lines]


def whole(figure: str) -> str:
    """Return a figure that is not wrapped between number and unit."""
    return figure.replace(" ", _NO_BREAK)


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
