"""MemoryReport -- the values that a fused function saves and recomputes, the reasons, and the cost."""

import itertools
import json
import re
import shutil
import statistics
import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from ...text_table import Row, amount, readable_bytes, table_lines, wrapped
from ..choose.budget import smallest_saved_bytes
from ..choose.cost import CostModel, flops_of
from ..choose.partitioners import budget
from ..joint_graph import CutGraph

_POINTS: Final = 12
_WORST_GRADIENTS: Final = 5
_LINE_OF_CODE: Final = 50


@dataclass(frozen=True)
class SavedValue:
    """A value that forward saves for backward.

    Attributes:
        name: the name of its node in the joint graph.
        module: the path of the module that computed it, as "blocks.0.attention", or "".
        op: its op; "input" for an argument, "parameter" for a tensor that outlives the call.
        source: `file:line: code` of the user's code, or "".
        shape: its shape; a symbolic size as the number that the graph was traced with.
        dtype: its dtype, "int" for a size.
        num_bytes: the bytes of its storage, or of its compressed parts; 0 for a parameter, and for a view of memory
            that is saved already.
        reason: why it was saved.
        exact_bytes: the bytes that it would take without compression.
        why_exact: why it is not compressed; None if it is.
        error: the relative error of the compressed value on these inputs; None if it was not measured.
    """

    name: str
    module: str
    op: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    reason: str
    exact_bytes: int
    why_exact: str | None
    error: float | None


@dataclass(frozen=True)
class RecomputedValue:
    """A value of forward that backward recomputes.

    Attributes:
        name: the name of its node in the joint graph.
        module: the path of the module that computed it, or "".
        op: its op.
        source: `file:line: code` of the user's code, or "".
        num_bytes: the size of the value, which is not saved.
        moved_bytes: the memory traffic of recomputing it, by the cost model.
        flops: its FLOPs if it is a matmul, an attention or a convolution, else 0.
    """

    name: str
    module: str
    op: str
    source: str
    num_bytes: int
    moved_bytes: float
    flops: float


_Value = TypeVar("_Value", bound=SavedValue | RecomputedValue)


@dataclass(frozen=True)
class Totals:
    """The figures of one partitioner.

    Attributes:
        saved_bytes: bytes saved for backward, each storage once, without parameters.
        peak_bytes: the most bytes that forward and backward hold at once when they run op by op: values, results and
            gradients, without inputs and parameters. For several graphs the sum, an upper bound of the peak. None for
            "eager", which has no graph.
        recomputed_ops: the number of ops of forward that backward recomputes; an op that runs there twice counts twice.
        recomputed_flops: their FLOPs.
    """

    saved_bytes: int
    peak_bytes: int | None
    recomputed_ops: int
    recomputed_flops: float


@dataclass(frozen=True)
class ParetoPoint:
    """A point of the curve of memory against recompute."""

    saved_bytes: int
    recomputed_flops: float


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """The result of `explain`. Its text, also at a prompt and in a notebook, is tables as wide as the terminal.

    Attributes:
        subject: the function's or module's name.
        backend: the backend for which the graph was cut.
        partition: the partitioner.
        machine: the machine whose speed sets the prices, with the file of `fuselayers tune` if that measured it.
        saved: every saved value, in the order of the graph.
        recomputed: every recomputed value, in the order of the graph.
        totals: by partitioner: "this", and for comparison "eager" (autograd without a compiler), "default" (this
            library's), "torch default" and "torch min_cut" (PyTorch's partitioners, unless they cannot cut the graph).
        forward_flops: FLOPs of forward, counting matmuls, attention and convolutions.
        backward_flops: FLOPs of backward, recomputed ones included.
        forward_ideal_bytes: the least memory traffic of forward: its inputs, outputs and saved values, once each.
        backward_ideal_bytes: the least memory traffic of backward: saved values, incoming and outgoing gradients.
        compress: how saved values are compressed, or None.
        gradient_errors: with `compress`, the relative error of each parameter's gradient on these inputs (for a
            function, of each argument's gradient); empty if they were not measured.
        graphs: the graphs; not in the dict and the JSON.
        cost: the prices; not in the dict and the JSON.
    """

    subject: str
    backend: str
    partition: str
    machine: str
    saved: tuple[SavedValue, ...]
    recomputed: tuple[RecomputedValue, ...]
    totals: dict[str, Totals]
    forward_flops: float
    backward_flops: float
    forward_ideal_bytes: int
    backward_ideal_bytes: int
    compress: str | None
    gradient_errors: dict[str, float]
    graphs: tuple[CutGraph, ...] = field(compare=False)
    cost: CostModel = field(compare=False)

    def to_json(self) -> str:
        """Return all but the graphs and the prices as JSON."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("graphs", "cost")}
        return json.dumps(content, indent=2, default=asdict)

    def pareto(self) -> tuple[ParetoPoint, ...]:
        """Return the curve of memory against recompute for other budgets, from the most memory to the least.

        Twelve budgets are tried, evenly spaced from what `default` saves to the least possible. The curve leaves out
        what backward recomputes a second time for a lower peak, see `budget`.

        Raises:
            ValueError: the report is for several graphs.
        """
        if len(self.graphs) != 1:
            raise ValueError(
                f"a curve needs one graph, this report has {len(self.graphs)}; explain each part on its own"
            )
        (graph,) = self.graphs
        fused = self.backend != "eager"
        least = smallest_saved_bytes(graph.joint, cost=self.cost)
        most = self.totals["default"].saved_bytes
        curve: dict[int, float] = {}
        for step in range(_POINTS):
            limit = least + round((most - least) * step / (_POINTS - 1))
            saved = budget(max(limit, 1), cost=self.cost).saved_values(graph.joint, fused=fused)
            curve[graph.joint.saved_bytes(saved)] = sum(flops_of(node) for node in graph.joint.recomputed(saved))
        return tuple(ParetoPoint(size, curve[size]) for size in sorted(curve, reverse=True))

    def __repr__(self) -> str:
        return self.to_text()

    def to_text(self, *, rows: int = 40, width: int | None = None) -> str:
        """Return the tables that `print` shows. The same values of equal blocks share a row, with their sum.

        Args:
            rows: the most rows of a table; one more row has the sum of the rest.
            width: of a line. In a narrower one than a table, reasons go below their rows. None takes the variable
                COLUMNS, or else the terminal's width.
        """
        width = width or shutil.get_terminal_size().columns
        forward, backward = (amount(flops, "FLOP") for flops in (self.forward_flops, self.backward_flops))
        sentences = (
            f"{self.subject}: {self.partition} for {self.backend}, prices of {self.machine}",
            f"forward: at least {readable_bytes(self.forward_ideal_bytes)} moved, {forward}",
            f"backward: at least {readable_bytes(self.backward_ideal_bytes)} moved, {backward}",
        )
        about, *floors = (wrapped(line, width, indent=0) for line in sentences)
        lines = [*about, "", *table_lines(_totals_rows(self), width, left=(0,))]
        reasons = 3 if self.compress is None else 5
        lines += ["", "saved", *table_lines(_saved_rows(self, rows), width, left=(0, 1, reasons))]
        if self.compress is not None:
            lines += wrapped(_compression_text(self), width, indent=0)
        if self.recomputed:
            lines += ["", "recomputed", *table_lines(_recomputed_rows(self.recomputed, rows), width, left=(0,))]
        return "\n".join([*lines, "", *itertools.chain(*floors)])


def _totals_rows(report: MemoryReport) -> list[Row]:
    rows: list[Row] = [("partition", "saved", "of eager", "peak", "ops recomputed", "FLOPs recomputed")]
    eager = report.totals["eager"].saved_bytes
    for rule, totals in report.totals.items():
        share = f"{totals.saved_bytes / eager:.2f} x" if eager else "-"
        recomputed = f"{totals.recomputed_flops / report.forward_flops:.1%}" if report.forward_flops else "-"
        peak = "-" if totals.peak_bytes is None else readable_bytes(totals.peak_bytes)
        figures = readable_bytes(totals.saved_bytes), share, peak, str(totals.recomputed_ops), recomputed
        rows.append((rule, *figures))
    return rows


def _saved_rows(report: MemoryReport, most: int) -> list[Row]:
    def cells(values: Sequence[SavedValue], alike: bool) -> tuple[str, ...]:
        first, size = values[0], readable_bytes(_total_bytes(values))
        exact = readable_bytes(sum(value.exact_bytes for value in values))
        errors = [value.error for value in values if value.error is not None]
        compressed = () if report.compress is None else (exact, f"{max(errors):.2%}" if errors else "")
        shape = f"{'x'.join(map(str, first.shape)) or 'scalar'} {first.dtype}"
        return (shape, size, *compressed, first.reason) if alike else ("", size, *compressed, "")

    counted = [value for value in report.saved if value.num_bytes]
    rows = _value_rows(counted, cells, weight=_total_bytes, most=most)
    free = len(report.saved) - len(counted)
    headings = () if report.compress is None else ("exact", "error")
    nothing = [""] * len(headings)
    rows += [(f"{free} for free", "", "0 B", *nothing, "parameters, and views of saved memory")] if free else []
    return [("value", "shape", "bytes", *headings, "why"), *rows]


def _compression_text(report: MemoryReport) -> str:
    """Say which gradients have the largest errors, or why nothing is compressed."""
    if all(value.why_exact is not None for value in report.saved):
        reasons = dict.fromkeys(value.why_exact for value in report.saved if value.num_bytes)
        return f"{report.compress}: there is nothing to compress ({', '.join(map(str, reasons)) or 'nothing is saved'})"
    if not report.gradient_errors:
        measured = any(value.error is not None for value in report.saved)
        why = "no parameter and no argument has a gradient" if measured else "the tensors are on the meta device"
        return f"{report.compress}: errors of gradients are not measured, since {why}"
    worst = sorted(report.gradient_errors.items(), key=lambda item: -item[1])
    median = statistics.median(report.gradient_errors.values())
    named = ", ".join(f"{name} {error:.2%}" for name, error in worst[:_WORST_GRADIENTS])
    return f"{report.compress}: error of gradients, relative to exact: median {median:.2%}; largest {named}"


def _recomputed_rows(recomputed: Sequence[RecomputedValue], most: int) -> list[Row]:
    def weight(values: Sequence[RecomputedValue]) -> tuple[float, float]:
        return sum(value.flops for value in values), sum(value.moved_bytes for value in values)

    def cells(values: Sequence[RecomputedValue], alike: bool) -> tuple[str, ...]:
        flops, moved = weight(values)
        return readable_bytes(_total_bytes(values)), readable_bytes(moved), amount(flops, "FLOP") if flops else ""

    rows = _value_rows(recomputed, cells, weight=weight, most=most)
    return [("value", "not saved", "moved", "FLOPs"), *rows]


def _value_rows(
    values: Iterable[_Value],
    cells: Callable[[Sequence[_Value], bool], tuple[str, ...]],
    *,
    weight: Callable[[Sequence[_Value]], Any],
    most: int,
) -> list[Row]:
    """Return a row for each group of values that are alike, the heaviest first, and after `most` rows the sum of the
    rest.

    Values are alike if they have the same op and size, and their modules' paths differ in the first number only, as
    blocks.0.norm and blocks.1.norm.

    Args:
        values: the values of one table.
        cells: returns the cells of a row, from its values and whether they are alike.
        weight: returns the key by which rows are sorted.
        most: the most rows, without the sum.
    """
    groups: dict[Hashable, list[_Value]] = {}
    for value in values:
        path = _without_number(value.module)
        alike = (path, value.op, cells([value], True)[:2])
        groups.setdefault(value.name if path == value.module else alike, []).append(value)
    ordered = sorted(groups.values(), key=weight, reverse=True)
    rows: list[Row] = [(_called(group), *cells(group, True)) for group in ordered[:most]]
    hidden = [*itertools.chain(*ordered[most:])]
    return [*rows, (f"{len(hidden)} more", *cells(hidden, False))] if hidden else rows


def _without_number(module: str) -> str:
    """Return a module's path without its first number: "blocks.*.norm"."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module, count=1)


def _total_bytes(values: Iterable[SavedValue | RecomputedValue]) -> int:
    return sum(value.num_bytes for value in values)


def _called(values: Sequence[SavedValue | RecomputedValue]) -> str:
    """Return module, op and name of values that are alike; without a module, the start of the line of code."""
    value, *others = values
    op = value.op.split(".")[1] if value.op.count(".") == 2 else value.op
    named = f"{op} ({value.name})"
    if others:
        return f"{_without_number(value.module)} {named}, {len(values)} times"
    if value.module:
        return f"{value.module} {named}"
    file, _, rest = value.source.partition(":")
    line = textwrap.shorten(f"{Path(file).name}:{rest}", _LINE_OF_CODE, placeholder=" ...")
    return f"{named}, {line}" if rest else named
