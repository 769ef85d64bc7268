"""draw -- a joint graph as a picture: forward on the left, backward on the right, what is saved in colour between them.

Time runs down on the left and up on the right, so that an op's gradient stands beside the op, and a saved value is a
line from one side to the other. Each side is drawn as a subway map: a value has a lane of its own from the op that
makes it to its last reader. `draw_graph` and `draw_joint_graph` are functorch's names, for one traced graph and for a
joint graph on its way to the partitioner.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.fx as fx

from .joint_graph import CutGraph, JointGraph
from .node_kinds import num_bytes, source_line, storage_of
from .partitioners import default_partition

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["dot_text", "draw_curve", "draw_graph", "draw_graphs", "draw_joint_graph"]

_SAVED: Final = "#d1495b"
_AGAIN: Final = "#2e86ab"
_FORWARD: Final = "#6c757d"
_BACKWARD: Final = "#3a7d44"
_ROW: Final = 0.16  # inches for one op
_MOST_LABELS: Final = 120
_WIDTH: Final = 11.0
_PICTURES: Final = (".svg", ".png", ".dot")


def draw_graph(
    traced: fx.GraphModule,
    fname: str | Path,
    figname: str = "fx_graph",
    clear_meta: bool = True,
    prog: str | Sequence[str] | None = None,
    parse_stack_trace: bool = False,
    dot_graph_shape: str | None = None,
) -> Path:
    """Draw one traced graph, time running down, into an .svg, .png or .dot file. The arguments are functorch's.

    Args:
        traced: the graph; it stays as it is.
        fname: where to; without a suffix an .svg is written.
        figname: the title.
        clear_meta: False adds dtype and shape to each value, where they are known.
        prog: must be None: nothing here needs Graphviz.
        parse_stack_trace: True adds the line of the source to each op, where it is known.
        dot_graph_shape: the shape of a node in Graphviz's language, only for a .dot file; None is "box".

    Returns:
        The file's path.

    Raises:
        ValueError: another suffix, a `prog`, or a shape for a file that is not .dot.

    >>> import tempfile
    >>> graph = fx.symbolic_trace(lambda x: x.sin().cos())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_graph(graph, f"{folder}/waves").name
    'waves.svg'
    """
    path = Path(fname)
    path = path if path.suffix else path.with_suffix(".svg")
    if prog is not None:
        raise ValueError(
            f"prog must be None, got {prog!r}: pictures are drawn without Graphviz, which can read a .dot file"
        )
    _check_shape(path, dot_graph_shape)
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    returned = set(traced.graph.output_node().all_input_nodes)
    labels = {
        node: "  ".join(filter(None, _words_on(node, value=not clear_meta, line=parse_stack_trace))) for node in nodes
    }
    if path.suffix.lower() == ".dot":
        lines = [
            f"digraph {_quoted(figname)} {{",
            f"  node [shape={_quoted(dot_graph_shape or 'box')}, fontsize=10, style=filled];",
        ]
        for node in nodes:
            fill = "#f4a6b0" if node in returned else "#d8f3dc" if node.op == "placeholder" else "#e9ecef"
            lines.append(f'  "{node.name}" [label={_quoted(labels[node])}, fillcolor="{fill}"];')
        lines += [f'  "{source.name}" -> "{node.name}";' for node in nodes for source in node.all_input_nodes]
        path.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")
        return path
    figure = _figure(_WIDTH, max(2.0, _ROW * len(nodes)) + 1.0)
    axis = figure.add_subplot()
    _draw_one(nodes, labels, returned, axis)
    figure.suptitle(figname, fontsize=10, parse_math=False)
    _save(figure, path)
    return path


def draw_joint_graph(
    graph: fx.GraphModule,
    joint_inputs: Any,
    file_name: str | Path = "full_graph.png",
    dot_graph_shape: str | None = None,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    **_: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A partitioner that draws the joint graph, then cuts it as `default_partition` does. It is functorch's.

    The picture has forward on the left, backward on the right, and in red what `default_partition` saves. Several
    graphs write to one file, of which the last remains.

    Args:
        graph: the joint graph, from AOTAutograd.
        joint_inputs: from AOTAutograd too.
        file_name: an .svg, .png or .dot file; to choose it, pass `functools.partial(draw_joint_graph, file_name=...)`.
        dot_graph_shape: the shape of a node in Graphviz's language, only for a .dot file; None is "box".
        num_fwd_outputs: how many of the graph's outputs are forward's.
        static_lifetime_input_indices: which of its inputs outlive the call.

    Raises:
        ValueError: another suffix, or a shape for a file that is not .dot.
    """
    path = Path(file_name)
    _check_shape(path, dot_graph_shape)
    joint = JointGraph.of(
        graph, num_forward_outputs=num_fwd_outputs, static_input_indices=static_lifetime_input_indices
    )
    forward, backward = joint.split(default_partition.saved_values(joint, fused=True))
    cut = CutGraph(joint, forward, backward)
    draw_graphs([cut], path, title="joint graph, cut by default_partition", shape=dot_graph_shape or "box")
    return forward, backward


def draw_graphs(graphs: Sequence[CutGraph], path: Path, *, title: str, shape: str = "box") -> Path:
    """Draw graphs below each other into one .svg, .png or .dot file.

    Args:
        graphs: what to draw.
        path: where to; the suffix says what kind of file.
        title: above them.
        shape: of a node in a .dot file.

    Raises:
        ValueError: another suffix.
    """
    _check_suffix(path, _PICTURES)
    if path.suffix.lower() == ".dot":
        path.write_text(dot_text(graphs, title=title, shape=shape), encoding="utf-8")
        return path
    heights = [max(2.0, _ROW * max(len(_ops(graph.forward)), len(_ops(graph.backward)))) for graph in graphs]
    figure = _figure(_WIDTH, sum(heights) + 1.2)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    for graph, axis in zip(graphs, axes[:, 0], strict=True):
        _draw_cut(graph, axis)
    figure.suptitle(title, fontsize=10, parse_math=False)
    _save(figure, path)
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


def _save(figure: "Figure", path: Path) -> None:
    # A PNG of more than 2^16 pixels in height cannot be written.
    figure.savefig(path, dpi=min(120.0, 60_000 / figure.get_figheight()))


def dot_text(graphs: Sequence[CutGraph], *, title: str, shape: str = "box") -> str:
    """The graphs in Graphviz's language, saved values as red edges and what is computed again as blue boxes.

    >>> print(dot_text((), title="nothing"))
    digraph "nothing" {
      node [shape="box", fontsize=10, style=filled];
    }
    <BLANKLINE>
    """
    lines = [f"digraph {_quoted(title)} {{", f"  node [shape={_quoted(shape)}, fontsize=10, style=filled];"]
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


def _words_on(node: fx.Node, *, value: bool, line: bool) -> Sequence[str]:
    """What a node of one traced graph is labelled with: its name, its op, its value, its line in the source."""
    made = node.meta.get("val")
    tensor = f"{str(made.dtype).removeprefix('torch.')}{list(made.shape)}" if isinstance(made, torch.Tensor) else ""
    return (
        node.name,
        "input" if node.op == "placeholder" else str(node.target),
        tensor if value else "",
        source_line(node) if line else "",
    )


def _draw_one(
    nodes: Sequence[fx.Node], labels: Mapping[fx.Node, str], returned: Collection[fx.Node], axis: "Axes"
) -> None:
    from matplotlib.collections import LineCollection

    lanes = _lanes(nodes)
    at = {node: (-float(lanes[node]), place + 0.5) for place, node in enumerate(nodes)}
    data_lines = [(at[source], at[node]) for node in nodes for source in node.all_input_nodes]
    axis.add_collection(LineCollection(data_lines, colors="#ced4da", linewidths=0.7, zorder=1))
    kinds = {_BACKWARD: "input", _FORWARD: "computed", _SAVED: "returned"}
    _draw_ops(
        axis,
        nodes,
        at,
        lambda node: _SAVED if node in returned else _BACKWARD if node.op == "placeholder" else _FORWARD,
    )
    for node in nodes:
        axis.text(0.6, at[node][1], labels[node], ha="left", va="center", fontsize=6, color="#343a40", parse_math=False)
    for colour, label in kinds.items():
        axis.plot([], [], "s", color=colour, label=label)
    axis.legend(loc="upper center", ncols=3, fontsize=7, frameon=False)
    axis.set_xlim(-max(lanes.values(), default=0) - 1, 30)
    axis.set_ylim(len(nodes) + 1, -2)
    axis.axis("off")


def _draw_cut(graph: CutGraph, axis: "Axes") -> None:
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


def _check_shape(path: Path, shape: str | None) -> None:
    _check_suffix(path, _PICTURES)
    if shape is not None and path.suffix.lower() != ".dot":
        raise ValueError(f"dot_graph_shape is for a .dot file, which Graphviz draws; got {shape!r} for {str(path)!r}")


def _check_suffix(path: Path, allowed: Sequence[str]) -> None:
    if path.suffix.lower() not in allowed:
        raise ValueError(f"a picture's file must end in {', '.join(allowed)}, got {str(path)!r}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'
