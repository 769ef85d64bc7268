"""MemoryReport -- the values that a fused function saves and recomputes, the reasons, and the cost."""

from __future__ import annotations

import html
import io
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..figure import new_figure
from .cost import CostModel, flops_of
from .draw import check_suffix
from .joint_graph import CutGraph
from .partitioners import budget
from .saved_by_budget import smallest_saved_bytes

if TYPE_CHECKING:  # rich is only imported by what prints
    from rich.console import Console
    from rich.table import Table

_IN_A_NOTEBOOK: Final = 10
_WORST_GRADIENTS: Final = 5


@dataclass(frozen=True)
class SavedValue:
    """A value that forward saves for backward.

    Attributes:
        name: of the node in the joint graph.
        module: the path of the module that computed it, as "blocks.0.attention", or "".
        op: its op; "input" for an argument, "parameter" for a tensor that outlives the call.
        source: `file:line: code` of the user's code, or "".
        shape: its shape; a symbolic size as the number that the graph was traced with.
        dtype: its dtype, "int" for a size.
        num_bytes: what saving it takes: the size of its storage, or of its compressed parts; 0 for a parameter, and for
            a view of memory that is saved already.
        reason: why it was saved.
        exact_bytes: what saving it exactly would take.
        why_exact: why it is not compressed; None if it is.
        error: of the compressed value, relative to the exact one, on these inputs; None if it was not measured.
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
        name: of the node in the joint graph.
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


@dataclass(frozen=True)
class Totals:
    """The figures of one partitioner.

    Attributes:
        saved_bytes: bytes saved for backward, each storage once, without parameters.
        peak_bytes: the most bytes that forward and backward hold at once when they run op by op: values, results and
            gradients, without inputs and parameters. For several graphs their sum, which the peak does not exceed. None
            for "eager", which has no graph.
        recomputed_ops: how many ops of forward backward recomputes; one that runs there twice counts twice.
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


@dataclass(frozen=True)
class MemoryReport:
    """The result of `explain`. Print it, or read its attributes.

    Attributes:
        subject: the function's or module's name.
        backend: the backend for which the graph was cut.
        partition: the partitioner.
        machine: the machine whose speed sets the prices.
        saved: every saved value, in the order of the graph.
        recomputed: every recomputed value, in the order of the graph.
        totals: by partitioner: "this", and for comparison "eager" (autograd without a compiler), "default" (this
            library's), "torch default" and "torch min_cut" (PyTorch's partitioners, unless they cannot cut the graph).
        forward_flops: FLOPs of forward, counting matmuls, attention and convolutions.
        backward_flops: FLOPs of backward, recomputed ones included.
        forward_ideal_bytes: the least memory traffic of forward: its inputs, outputs and saved values, once each.
        backward_ideal_bytes: the least memory traffic of backward: saved values, incoming and outgoing gradients.
        forward_seconds: the least time for forward on that machine, by its FLOPs or its ideal bytes.
        backward_seconds: the least time for backward.
        compress: how saved values are compressed, or None.
        gradient_errors: with `compress`, for each parameter's gradient its error relative to the exact one on these
            inputs, for a function without parameters of its arguments' gradients; empty if they were not measured.
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
    forward_seconds: float
    backward_seconds: float
    compress: str | None
    gradient_errors: dict[str, float]
    graphs: tuple[CutGraph, ...] = field(repr=False, compare=False)
    cost: CostModel = field(repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return all but the graphs and the prices, in plain Python types."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("graphs", "cost")}
        content["saved"] = [asdict(value) for value in self.saved]
        content["recomputed"] = [asdict(value) for value in self.recomputed]
        content["totals"] = {rule: asdict(totals) for rule, totals in self.totals.items()}
        return content

    def to_json(self) -> str:
        """Return `as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def pareto(self, *, points: int = 12) -> tuple[ParetoPoint, ...]:
        """Return the curve of memory against recompute for other budgets, from the most memory to the least.

        It leaves out what backward recomputes a second time for a lower peak, see `budget`.

        Args:
            points: how many budgets are tried, evenly spaced from what `default` saves to the least possible.

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
        for index in range(points):
            limit = least + round((most - least) * (points - 1 - index) / max(points - 1, 1))
            saved = budget(max(limit, 1), cost=self.cost).saved_values(graph.joint, fused=fused)
            curve[graph.joint.saved_bytes(saved)] = sum(flops_of(node) for node in graph.joint.recomputed(saved))
        return tuple(ParetoPoint(size, curve[size]) for size in sorted(curve, reverse=True))

    def draw_pareto(self, path: str | Path, *, points: int = 12) -> Path:
        """Draw the curve of memory against recompute, into a .svg or .png file; returns its path.

        Raises:
            ValueError: another kind of file, or several graphs.
            MissingPackageError: matplotlib is not installed.
        """
        path = Path(path)
        check_suffix(path, ".svg", ".png")
        curve = self.pareto(points=points)
        figure = new_figure(figsize=(7, 4.5))
        axis = figure.add_subplot()
        sizes = [point.saved_bytes / 1e6 for point in curve]
        share = 100 / (self.forward_flops or 1.0)
        # Between two points, a budget costs what the smaller one costs.
        axis.step(sizes, [share * point.recomputed_flops for point in curve], where="pre", marker="o", label="budget")
        rules = [rule for rule in self.totals if rule != "default"]
        for rule, marker in zip(rules, itertools.cycle("*sv^DP"), strict=False):
            totals = self.totals[rule]
            label = f"this ({self.partition})" if rule == "this" else rule
            point = [totals.saved_bytes / 1e6], [share * totals.recomputed_flops]
            axis.plot(*point, marker, markersize=9, label=label.replace("$", "\\$"))  # a legend reads mathematics
        axis.set(xlabel="MB saved for backward", ylabel="% of forward's FLOPs recomputed")
        axis.set_title(f"{self.subject}, {self.backend}", fontsize=10, parse_math=False)
        axis.legend()
        axis.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
        return path

    def __str__(self) -> str:
        return self._text()

    def _repr_html_(self) -> str:
        """Return the tables with the largest values, for a notebook."""
        return f"<pre>{html.escape(self._text(most=_IN_A_NOTEBOOK))}</pre>"

    def _text(self, *, most: int = 40) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO())  # as wide as the terminal, or COLUMNS
        self.print(console, most=most)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip()

    def print(self, console: Console | None = None, *, most: int = 40) -> None:
        """Print tables to a console, or to stdout.

        Args:
            console: where to.
            most: how many values each table lists; one row has the sum of the rest.
        """
        from rich.console import Console

        console = console or Console()
        console.print(
            f"{self.subject}: {self.partition} for {self.backend}, prices of {self.machine}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        console.print(_totals_table(self), highlight=False)
        console.print(_saved_table(self, most, width=console.width), highlight=False)
        if self.compress is not None:
            console.print(_compression_text(self), highlight=False, soft_wrap=True)
        if self.recomputed:
            console.print(_recomputed_table(self.recomputed, most), highlight=False)
        console.print(
            f"forward: at least {readable_bytes(self.forward_ideal_bytes)} moved, {_flops(self.forward_flops)}, "
            f"{_time(self.forward_seconds)}\n"
            f"backward: at least {readable_bytes(self.backward_ideal_bytes)} moved, {_flops(self.backward_flops)}, "
            f"{_time(self.backward_seconds)}",
            highlight=False,
            soft_wrap=True,
        )


def readable_bytes(size: float) -> str:
    """Return a size in bytes as text.

    >>> readable_bytes(12_582_912), readable_bytes(8)
    ('12.6 MB', '8 B')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:.0f} B"


def _totals_table(report: MemoryReport) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("partition")
    for heading in ("saved", "of eager", "peak", "ops recomputed", "FLOPs recomputed"):
        table.add_column(heading, justify="right")
    eager = report.totals["eager"].saved_bytes
    for rule, totals in report.totals.items():
        share = f"{totals.saved_bytes / eager:.2f} x" if eager else "-"
        recomputed = f"{totals.recomputed_flops / report.forward_flops:.1%}" if report.forward_flops else "-"
        peak = "-" if totals.peak_bytes is None else readable_bytes(totals.peak_bytes)
        table.add_row(rule, readable_bytes(totals.saved_bytes), share, peak, str(totals.recomputed_ops), recomputed)
    return table


def _saved_table(report: MemoryReport, most: int, *, width: int) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="saved", title_justify="left", box=None, pad_edge=False)
    table.add_column("value", overflow="fold")
    table.add_column("shape", min_width=9)
    table.add_column("bytes", justify="right", no_wrap=True)
    if report.compress is not None:
        table.add_column("exact", justify="right", no_wrap=True)
        table.add_column("error", justify="right", no_wrap=True)
    # At 80 columns a module's path, such as blocks.11.residual.norms.0, stays in one line. The limit is on this column
    # because rich folds a column with a min_width for another width than it prints, and cuts the words that do not fit.
    table.add_column("why", overflow="fold", max_width=max(22, width - 80))
    saved, by_size = report.saved, _by_size(report.saved)
    for value in by_size[:most]:
        cells = [_shape(value), readable_bytes(value.num_bytes)]
        if report.compress is not None:
            error = "" if value.error is None else f"{value.error:.2%}"
            cells += [readable_bytes(value.exact_bytes), error if value.why_exact is None else "none"]
        table.add_row(escape(_called(value)), *cells, escape(value.reason))
    blank = ["", ""] if report.compress is not None else []
    rest = by_size[most:]
    if rest:
        size = readable_bytes(sum(value.num_bytes for value in rest))
        table.add_row(f"{len(rest)} more", "", size, *blank, "")
    free = len(saved) - len(by_size)
    if free:
        table.add_row(f"{free} for free", "", "0 B", *blank, "parameters, and views of saved memory")
    return table


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


def _recomputed_table(recomputed: Sequence[RecomputedValue], most: int) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="recomputed", title_justify="left", box=None, pad_edge=False)
    table.add_column("value", overflow="fold")
    for heading in ("not saved", "moved", "FLOPs"):
        table.add_column(heading, justify="right", no_wrap=True)
    costliest = sorted(recomputed, key=lambda value: (-value.flops, -value.moved_bytes, -value.num_bytes))
    for value in costliest[:most]:
        sizes = readable_bytes(value.num_bytes), readable_bytes(value.moved_bytes)
        table.add_row(escape(_called(value)), *sizes, _flops(value.flops) if value.flops else "")
    rest = costliest[most:]
    if rest:
        sums = sum(value.num_bytes for value in rest), sum(value.moved_bytes for value in rest)
        table.add_row(f"{len(rest)} more", *map(readable_bytes, sums), "")
    return table


def _by_size(saved: Sequence[SavedValue]) -> list[SavedValue]:
    return sorted((value for value in saved if value.num_bytes), key=lambda value: -value.num_bytes)


def _shape(value: SavedValue) -> str:
    return f"{'x'.join(map(str, value.shape)) or 'scalar'} {value.dtype}"


def _called(value: SavedValue | RecomputedValue) -> str:
    """Return module, op and name; if no module called the op, op, name and line, without the folders of its file."""
    op = value.op.split(".")[1] if value.op.count(".") == 2 else value.op
    named = f"{op} ({value.name})"
    if value.module:
        return f"{value.module} {named}"
    file, _, rest = value.source.partition(":")
    return f"{named}, {Path(file).name}:{rest}" if rest else named


def _flops(flops: float) -> str:
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= scale:
            return f"{flops / scale:,.1f} {unit}"
    return f"{flops:.0f} FLOP"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms at least" if seconds < 1 else f"{seconds:.3g} s at least"
