"""MemoryReport -- the values that a fused function saves and recomputes, the reasons, and the cost."""

import html
import itertools
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ..figure import new_figure
from .cost import CostModel, flops_of
from .draw import check_suffix
from .joint_graph import CutGraph
from .partitioners import budget
from .report_text import report_text
from .saved_by_budget import smallest_saved_bytes

_IN_A_NOTEBOOK: Final = 10


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
        num_bytes: the size of its storage; 0 for a parameter, and for a view of memory that is saved already.
        reason: why it was saved.
    """

    name: str
    module: str
    op: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    reason: str


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
        return self.to_text()

    def _repr_html_(self) -> str:
        """Return the tables with the largest values, for a notebook."""
        return f"<pre>{html.escape(self.to_text(rows=_IN_A_NOTEBOOK))}</pre>"

    def to_text(self, *, rows: int = 40, width: int | None = None) -> str:
        """Return the tables that `print` shows. Values that equal blocks have in common share a row.

        Args:
            rows: how many rows each table has at most; the last row has the sum of the rest.
            width: of a line; None for the variable COLUMNS, else the terminal's.
        """
        return report_text(self, rows=rows, width=width or shutil.get_terminal_size().columns)
