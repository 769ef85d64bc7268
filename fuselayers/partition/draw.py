"""draw -- a joint graph as a picture: forward on the left, backward on the right, what is saved in colour between them.

Time runs down on the left and up on the right, so that an op's gradient stands beside the op, and a saved value is a
line from one side to the other. Each side is drawn as a subway map: a value has a lane of its own from the op that
makes it to its last reader.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch.fx as fx

from .joint_graph import CutGraph
from .node_kinds import num_bytes, source_line, storage_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["dot_text", "draw_curve", "draw_graphs"]

_SAVED: Final = "#d1495b"
_AGAIN: Final = "#2e86ab"
_FORWARD: Final = "#6c757d"
_BACKWARD: Final = "#3a7d44"
_ROW: Final = 0.16  # inches for one op
_MOST_LABELS: Final = 120
_WIDTH: Final = 11.0


def draw_graphs(graphs: Sequence[CutGraph], path: Path, *, title: str) -> Path:
    """Draw graphs below each other into one .svg, .png or .dot file.

    Args:
        graphs: what to draw.
        path: where to; the suffix says what kind of file.
        title: above them.

    Raises:
        ValueError: another suffix.
    """
    _check_suffix(path, (".svg", ".png", ".dot"))
    if path.suffix.lower() == ".dot":
        path.write_text(dot_text(graphs, title=title), encoding="utf-8")
        return path
    heights = [max(2.0, _ROW * max(len(_ops(graph.forward)), len(_ops(graph.backward)))) for graph in graphs]
    figure = _figure(_WIDTH, sum(heights) + 1.2)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    for graph, axis in zip(graphs, axes[:, 0], strict=True):
        _draw_graph(graph, axis)
    figure.suptitle(title, fontsize=10, parse_math=False)
    # A PNG of more than 2^16 pixels in height cannot be written.
    figure.savefig(path, dpi=min(120.0, 60_000 / figure.get_figheight()))
    return path


def draw_curve(
    curve: Sequence[tuple[float, float]], marks: Mapping[str, tuple[float, float]], path: Path, *, title: str
) -> Path:
    """Draw memory against recompute.

    Args:
        curve: points (MB saved, % of forward's FLOPs run again), from the most memory to the least.
        marks: single points by name, to compare with.
        path: a .svg or .png file.
        title: above it.

    Raises:
        ValueError: another suffix.
    """
    _check_suffix(path, (".svg", ".png"))
    figure = _figure(7, 4.5)
    axis = figure.add_subplot()
    sizes, flops = [size for size, _ in curve], [share for _, share in curve]
    axis.step(sizes, flops, where="pre", marker="o", color=_AGAIN, label="budget")
    for (name, (size, share)), marker in zip(marks.items(), itertools.cycle("*sv^DP"), strict=False):
        axis.plot([size], [share], marker, markersize=9, label=name.replace("$", "\\$"))  # a legend reads mathematics
    axis.set_xlabel("MB saved for backward")
    axis.set_ylabel("% of forward's FLOPs run again")
    axis.set_title(title, fontsize=10, parse_math=False)
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path


def _figure(width: float, height: float) -> "Figure":
    # matplotlib takes half a second to import, which only who draws should pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def dot_text(graphs: Sequence[CutGraph], *, title: str) -> str:
    """The graphs in Graphviz's language, saved values as red edges and what is computed again as blue boxes.

    >>> print(dot_text((), title="nothing"))
    digraph "nothing" {
      node [shape=box, fontsize=10, style=filled];
    }
    <BLANKLINE>
    """
    lines = [f"digraph {_quoted(title)} {{", "  node [shape=box, fontsize=10, style=filled];"]
    for number, graph in enumerate(graphs):
        again = _names(graph.forward) & _names(graph.backward)
        saved = _saved_names(graph)
        for side, module, colour in (("forward", graph.forward, "#e9ecef"), ("backward", graph.backward, "#d8f3dc")):
            lines.append(f"  subgraph cluster_{side}_{number} {{ label={side};")
            for node in _ops(module):
                fill = "#a9d6e5" if side == "backward" and node.name in again else colour
                label = f"{node.name}\\n{node.target}\\n{num_bytes(node):,} B"
                tooltip = _quoted(source_line(node))
                lines.append(
                    f'    "{side}{number}.{node.name}" [label="{label}", fillcolor="{fill}", tooltip={tooltip}];'
                )
            lines.append("  }")
            for node in _ops(module):
                for source in node.all_input_nodes:
                    if source.op != "placeholder":
                        lines.append(f'  "{side}{number}.{source.name}" -> "{side}{number}.{node.name}";')
        for name, readers in saved.items():
            for reader in readers:
                style = f'[color="{_SAVED}", penwidth=2, constraint=false]'
                lines.append(f'  "forward{number}.{name}" -> "backward{number}.{reader.name}" {style};')
    return "\n".join([*lines, "}"]) + "\n"


def _draw_graph(graph: CutGraph, axis: "Axes") -> None:
    from matplotlib.collections import LineCollection

    forward, backward = _ops(graph.forward), _ops(graph.backward)
    rows = max(len(forward), len(backward), 1)
    # Both sides take the whole height, whatever the number of their ops.
    down = {node: rows * (place + 0.5) / len(forward) for place, node in enumerate(forward)}
    up = {node: rows - rows * (place + 0.5) / len(backward) for place, node in enumerate(backward)}
    left, right = _lanes(forward), _lanes(backward)
    widest_left, widest_right = max(left.values(), default=0), max(right.values(), default=0)
    gap = 6.0
    at: dict[fx.Node, tuple[float, float]] = {node: (widest_left - left[node], down[node]) for node in forward}
    at.update({node: (widest_left + gap + right[node], up[node]) for node in backward})
    data_lines = [
        (at[source], at[node])
        for side in (forward, backward)
        for node in side
        for source in node.all_input_nodes
        if source in at
    ]
    axis.add_collection(LineCollection(data_lines, colors="#ced4da", linewidths=0.7, zorder=1))
    by_name = {node.name: node for node in forward}
    inputs = {node.name: node for node in graph.forward.graph.find_nodes(op="placeholder")}
    largest = max((num_bytes(node) for node in (*forward, *inputs.values())), default=1) or 1
    for name, readers in _saved_names(graph).items():
        node = by_name.get(name) or inputs.get(name)
        if node is None or not readers:
            continue
        start = at.get(node, (widest_left, -1.0))  # an input comes in at the top
        width = 0.6 + 2.4 * num_bytes(node) / largest
        cut = [(start, at[reader]) for reader in readers if reader in at]
        axis.add_collection(LineCollection(cut, colors=_SAVED, linewidths=width, alpha=0.7, zorder=2))
    again = _names(graph.forward) & _names(graph.backward)
    saved = set(_saved_names(graph))
    for nodes, colour_of in (
        (forward, lambda node: _SAVED if node.name in saved else _FORWARD),
        (backward, lambda node: _AGAIN if node.name in again else _BACKWARD),
    ):
        _draw_ops(axis, nodes, at, colour_of)
    _label_ops(axis, forward, at, saved, side="right")
    _label_ops(axis, backward, at, again, side="left")
    for colour, label in (
        (_SAVED, "saved"),
        (_AGAIN, "computed again"),
        (_FORWARD, "forward, time runs down"),
        (_BACKWARD, "backward, time runs up"),
    ):
        axis.plot([], [], "s", color=colour, label=label)
    axis.legend(loc="upper center", ncols=4, fontsize=7, frameon=False)
    axis.set_xlim(-9, widest_left + gap + widest_right + 9)
    axis.set_ylim(rows + 1, -3)
    axis.axis("off")


def _draw_ops(
    axis: "Axes", nodes: Sequence[fx.Node], at: dict[fx.Node, tuple[float, float]], colour_of: Callable[[fx.Node], str]
) -> None:
    places = [at[node] for node in nodes]
    if places:
        colours = [colour_of(node) for node in nodes]
        axis.scatter([x for x, _ in places], [y for _, y in places], s=9, c=colours, marker="s", zorder=3)


def _label_ops(
    axis: "Axes", nodes: Sequence[fx.Node], at: dict[fx.Node, tuple[float, float]], marked: set[str], *, side: str
) -> None:
    """Name the ops; in a large graph only those that are saved, or computed again and large."""
    if len(nodes) > _MOST_LABELS:
        nodes = [node for node in nodes if node.name in marked]
        nodes = sorted(nodes, key=num_bytes, reverse=True)[:_MOST_LABELS]
    outside = -0.6 if side == "right" else max((x for x, _ in at.values()), default=0.0) + 0.6
    for node in nodes:
        size = num_bytes(node)
        text = f"{node.name}  {size / 1e6:,.2f} MB" if size >= 1e4 else node.name
        axis.text(outside, at[node][1], text, ha=side, va="center", fontsize=5, color="#343a40")


def _lanes(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each op the lowest lane that no living value is in."""
    place = {node: number for number, node in enumerate(nodes)}
    last = {node: max((place[user] for user in node.users if user in place), default=place[node]) for node in nodes}
    busy_until: list[int] = []
    lane: dict[fx.Node, int] = {}
    for node in nodes:
        now = place[node]
        free = next((number for number, until in enumerate(busy_until) if until <= now), len(busy_until))
        if free == len(busy_until):
            busy_until.append(0)
        busy_until[free] = last[node]
        lane[node] = free
    return lane


def _ops(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def _names(module: fx.GraphModule) -> set[str]:
    return {node.name for node in _ops(module)}


def _saved_names(graph: CutGraph) -> dict[str, list[fx.Node]]:
    """What backward takes from forward, with its readers there; parameters, which cost nothing, are left out."""
    joint = graph.joint
    kept = {
        node.name
        for node in joint.nodes
        if node not in joint.from_gradients and storage_of(node) not in joint.static_inputs
    }
    taken = graph.backward.graph.find_nodes(op="placeholder")
    return {node.name: list(node.users) for node in taken if node.name in kept}


def _check_suffix(path: Path, allowed: Sequence[str]) -> None:
    if path.suffix.lower() not in allowed:
        raise ValueError(f"a picture's file must end in {', '.join(allowed)}, got {str(path)!r}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'
