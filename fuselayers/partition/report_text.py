"""The text of a memory report: tables that fit a terminal."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from .memory_report import MemoryReport, RecomputedValue, SavedValue

# The first number in a module's path, as in blocks.11.norm.
_NUMBERED: Final = re.compile(r"(?P<list>.+?)\.(?P<number>\d+)(?:\.(?P<rest>.+))?")
# A line may end after a space, and after a dot that is no decimal point. A figure and its unit have no space between.
_BREAK: Final = re.compile(r"(?<=\S )(?=\S)|(?<=[^\W\d]\.)(?=\w)|(?<=\d\.)(?=[^\W\d])")
_NO_BREAK: Final = "\N{NO-BREAK SPACE}"

_Value = TypeVar("_Value", bound="SavedValue | RecomputedValue")
_Row = str | tuple[str, ...]


def report_text(report: MemoryReport, *, rows: int, width: int) -> str:
    """Return the text of `MemoryReport.to_text`."""
    sentences = (
        f"{report.subject}: {report.partition} for {report.backend}, prices of {report.machine}",
        f"forward: at least {readable_bytes(report.forward_ideal_bytes)} moved, {_flops(report.forward_flops)}, "
        f"{_seconds(report.forward_seconds)}",
        f"backward: at least {readable_bytes(report.backward_ideal_bytes)} moved, {_flops(report.backward_flops)}, "
        f"{_seconds(report.backward_seconds)}",
    )
    about, *floors = (textwrap.wrap(line, width, break_long_words=False) for line in sentences)
    lines = [*about, "", *_table(_totals_rows(report), width, left=(0,))]
    lines += ["", "saved", *_table(_saved_rows(report.saved, rows), width, left=(0, 1, 3))]
    if report.recomputed:
        lines += ["", "recomputed", *_table(_recomputed_rows(report.recomputed, rows), width, left=(0,))]
    return "\n".join([*lines, "", *itertools.chain(*floors)])


def readable_bytes(size: float) -> str:
    """Return a size in bytes as text.

    >>> readable_bytes(12_582_912), readable_bytes(8)
    ('12.6 MB', '8 B')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:.0f} B"


def _totals_rows(report: MemoryReport) -> list[_Row]:
    rows: list[_Row] = [("partition", "saved", "of eager", "peak", "ops recomputed", "FLOPs recomputed")]
    eager = report.totals["eager"].saved_bytes
    for rule, totals in report.totals.items():
        share = f"{totals.saved_bytes / eager:.2f} x" if eager else "-"
        recomputed = f"{totals.recomputed_flops / report.forward_flops:.1%}" if report.forward_flops else "-"
        peak = "-" if totals.peak_bytes is None else readable_bytes(totals.peak_bytes)
        figures = readable_bytes(totals.saved_bytes), share, peak, str(totals.recomputed_ops), recomputed
        rows.append((rule, *map(_whole, figures)))
    return rows


def _saved_rows(saved: Sequence[SavedValue], most: int) -> list[_Row]:
    def cells(values: Sequence[SavedValue]) -> tuple[str, ...]:
        size = _whole(readable_bytes(_total_bytes(values)))
        return (_shape(values[0]), size, values[0].reason) if len(values) == 1 else ("", size, "")

    counted = [value for value in saved if value.num_bytes]
    rows = _value_rows(counted, cells, weight=_total_bytes, most=most)
    free = len(saved) - len(counted)
    rows += [(f"{free} for free", "", _whole("0 B"), "parameters, and views of saved memory")] if free else []
    return [("value", "shape", "bytes", "why"), *rows]


def _recomputed_rows(recomputed: Sequence[RecomputedValue], most: int) -> list[_Row]:
    def weight(values: Sequence[RecomputedValue]) -> tuple[float, float]:
        return sum(value.flops for value in values), sum(value.moved_bytes for value in values)

    def cells(values: Sequence[RecomputedValue]) -> tuple[str, ...]:
        flops, moved = weight(values)
        sums = readable_bytes(_total_bytes(values)), readable_bytes(moved), _flops(flops) if flops else ""
        return tuple(map(_whole, sums))

    rows = _value_rows(recomputed, cells, weight=weight, most=most)
    return [("value", _whole("not saved"), "moved", "FLOPs"), *rows]


def _value_rows(
    values: Iterable[_Value],
    cells: Callable[[Sequence[_Value]], tuple[str, ...]],
    *,
    weight: Callable[[Sequence[_Value]], Any],
    most: int,
) -> list[_Row]:
    """Return a row for each value, the heaviest first, and the sum of those after the first `most` rows.

    Values that are alike, at the same place in several modules of a list, have one row. Those of the same modules stand
    together, below a line that names the modules.

    Args:
        values: of one table.
        cells: the cells of a value, and of several values together.
        weight: by which rows are sorted.
        most: rows of the table.
    """
    groups = sorted(_by_modules(values, cells), key=lambda group: weight([*itertools.chain(*group)]), reverse=True)
    rows: list[_Row] = []
    hidden: list[_Value] = []
    for group in groups:
        ordered = sorted(group, key=weight, reverse=True)
        shown, times = ordered[:most], len(group[0])
        hidden += itertools.chain(*ordered[most:])
        most -= len(shown)
        if shown and times > 1:
            total = readable_bytes(_total_bytes(itertools.chain(*shown)))
            rows.append(f"{_range([value.module for value in group[0]])}, {times} times, {total} in all, in each:")
        for value, *others in shown:
            called = f"  {_called(value, _numbered(value.module)[2])}" if others else _called(value, value.module)
            rows.append((called, *cells([value])))
    return [*rows, (f"{len(hidden)} more", *cells(hidden))] if hidden else rows


def _by_modules(
    values: Iterable[_Value], cells: Callable[[Sequence[_Value]], tuple[str, ...]]
) -> Iterable[list[list[_Value]]]:
    """Return lists of values with the same op and sizes. Those of the same modules are one group."""
    rows: dict[Hashable, list[_Value]] = {}
    times: Counter[Hashable] = Counter()
    for value in values:
        modules, number, rest = _numbered(value.module)
        place = (modules, rest, value.op, cells([value])[:2]) if number else value.name
        times[number, place] += 1
        rows.setdefault((place, times[number, place]), []).append(value)
    groups: dict[Hashable, list[list[_Value]]] = {}
    for row in rows.values():
        row.sort(key=lambda value: int(_numbered(value.module)[1] or 0))  # backward recomputes the last block first
        modules_of = tuple(_numbered(value.module)[:2] for value in row)
        groups.setdefault(modules_of if len(row) > 1 else row[0].name, []).append(row)
    return groups.values()


def _numbered(module: str) -> tuple[str, str, str]:
    """Return the list that a module is in, its number there, and its path in that: ("blocks", "11", "norm")."""
    match = _NUMBERED.fullmatch(module)
    return (match["list"], match["number"], match["rest"] or "") if match else ("", "", module)


def _range(modules: Sequence[str]) -> str:
    """Return "blocks.0 to blocks.11", or the names one by one if some between are missing."""
    names = [f"{modules_list}.{number}" for modules_list, number, _ in map(_numbered, modules)]
    numbers = [int(_numbered(module)[1]) for module in modules]
    is_whole = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{names[0]} to {names[-1]}" if is_whole and len(names) > 2 else ", ".join(names)


def _table(rows: Sequence[_Row], width: int, *, left: Collection[int]) -> Iterator[str]:
    """Return the lines of a table. A cell that is too wide is folded between words, or at a dot of a name.

    A row that is no tuple is a line of its own. `left` are the columns that are aligned to the left. Where names are
    too long for columns, the text in the last column stands below its row.
    """
    columns = [*zip(*(row for row in rows if isinstance(row, tuple)), strict=True)]
    natural = [max(map(len, column)) for column in columns]
    widths = [max(len(line) for cell in column for line in _folded(cell, 0)) for column in columns]
    spare = width - sum(widths) - 2 * (len(widths) - 1)
    if spare < 0 and len(columns) - 1 in left:
        lines: list[_Row] = []
        for row in rows:
            lines += [row] if isinstance(row, str) else [row[:-1], f"    {row[-1]}"]
        yield from _table(lines, width, left=left)
        return
    for _ in range(spare):
        # The narrowest column that wants more gets one more character.
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
    """Return a cell as lines of a width, or as wide as its longest word."""
    text = cell.lstrip(" ")
    lines = [indent := cell[: len(cell) - len(text)]]
    for piece in _BREAK.split(text):
        if lines[-1] != indent and len(f"{lines[-1]}{piece}".rstrip(" ")) > width:
            lines.append(indent)
        lines[-1] += piece
    return [line.rstrip(" ") for line in lines]


def _whole(figure: str) -> str:
    return figure.replace(" ", _NO_BREAK)


def _total_bytes(values: Iterable[SavedValue | RecomputedValue]) -> int:
    return sum(value.num_bytes for value in values)


def _shape(value: SavedValue) -> str:
    return f"{'x'.join(map(str, value.shape)) or 'scalar'} {value.dtype}"


def _called(value: SavedValue | RecomputedValue, module: str) -> str:
    """Return module, op and name; if no module called the op, op, name and line, without the folders of its file."""
    op = value.op.split(".")[1] if value.op.count(".") == 2 else value.op
    named = f"{op} ({value.name})"
    if value.module:
        return f"{module} {named}".lstrip()
    file, _, rest = value.source.partition(":")
    return f"{named}, {Path(file).name}:{rest}" if rest else named


def _flops(flops: float) -> str:
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= scale:
            return f"{flops / scale:,.1f} {unit}"
    return f"{flops:.0f} FLOP"


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit} at least"
    return f"{seconds / 1e-6:.1f} us at least"
