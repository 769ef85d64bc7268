"""draw -- graphs as an .svg picture, or as a .dot file for Graphviz.

A cut graph has forward on the left, where time runs down, and backward on the right, where time runs up, so that an
op's gradient is beside the op. A red line is a saved value: the wider the line, the larger the value. `draw_graph` and
`draw_joint_graph` are functorch's names.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

import torch
import torch.fx as fx

from .joint_graph import CutGraph, JointGraph
from .node_kinds import num_bytes, source_line, storage_of
from .partitioners import default_partition

_RED, _BLUE, _GREY, _GREEN = "#d1495b", "#74b3ce", "#ced4da", "#95d5b2"
_ONE_GRAPH: Final = {"returned": _RED, "computed": _GREY, "input": _GREEN}
_CUT_GRAPH: Final = {"saved": _RED, "recomputed": _BLUE, "forward, time runs down": _GREY, "backward, up": _GREEN}
_ROW: Final = 14  # pixels for one op
# Where ops are, how their labels are aligned, and to which side their edges bend.
_LEFT, _RIGHT, _ALONE = (400, "end", 1), (720, "start", -1), (120, "start", -1)


class _Panel(NamedTuple):
    """A graph: label and colour of each op by name, and edges, with the width of the line of a saved value, else 0."""

    left: Mapping[str, tuple[str, str]]
    right: Mapping[str, tuple[str, str]]
    edges: Sequence[tuple[str, str, float]]


def draw_graph(
    traced: fx.GraphModule,
    fname: str | Path,
    figname: str = "fx_graph",
    clear_meta: bool = True,
    prog: str | Sequence[str] | None = None,
    parse_stack_trace: bool = False,
    dot_graph_shape: str | None = None,
) -> Path:
    """Draw one traced graph into an .svg or .dot file, and return the file's path. The arguments are functorch's.

    Args:
        traced: the graph; it is not changed.
        fname: the file; without a suffix it becomes an .svg.
        figname: the title.
        clear_meta: False adds dtype and shape to each value, where they are known.
        prog: must be None: Graphviz does not run here.
        parse_stack_trace: True adds the line of the source to each op, where it is known.
        dot_graph_shape: the shape of a node in Graphviz's language, only for a .dot file; None is "box".

    Raises:
        ValueError: another suffix, a `prog`, or a shape for a file that is not .dot.

    >>> import tempfile
    >>> graph = fx.symbolic_trace(lambda x: x.sin().cos())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_graph(graph, f"{folder}/waves").name
    'waves.svg'
    """
    path = Path(fname)
    if prog is not None:
        raise ValueError(f"prog must be None, got {prog!r}: write a .dot file, and run Graphviz on it")
    returned = set(traced.graph.output_node().all_input_nodes)
    ops = {}
    for node in traced.graph.nodes:
        value = node.meta.get("val")
        if node.op != "output":
            kind = "returned" if node in returned else "input" if node.op == "placeholder" else "computed"
            words = [node.name, _op(node)]
            if isinstance(value, torch.Tensor) and not clear_meta:
                words.append(f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
            words += [source_line(node)] if parse_stack_trace else []
            ops[node.name] = ("  ".join(words), _ONE_GRAPH[kind])
    edges = [(source.name, user.name, 0.0) for source in traced.graph.nodes for user in source.users]
    panel = _Panel({}, ops, [edge for edge in edges if edge[1] in ops])
    path = path if path.suffix else path.with_suffix(".svg")
    return _write(path, [panel], title=figname, legend=_ONE_GRAPH, shape=dot_graph_shape)


def draw_joint_graph(
    graph: fx.GraphModule,
    joint_inputs: Any,
    file_name: str | Path = "full_graph.svg",
    dot_graph_shape: str | None = None,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    **_: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph as `default_partition` does, and draw it. This is functorch's partitioner of that name.

    If a function has several graphs, all write to the one file, and the last graph remains.

    Args:
        graph: the joint graph, from AOTAutograd.
        joint_inputs: from AOTAutograd.
        file_name: an .svg or .dot file; to choose it, pass `functools.partial(draw_joint_graph, file_name=...)`.
        dot_graph_shape: the shape of a node in Graphviz's language, only for a .dot file; None is "box".
        num_fwd_outputs: how many of the graph's outputs are forward's.
        static_lifetime_input_indices: which of its inputs outlive the call.

    Raises:
        ValueError: another suffix, or a shape for a file that is not .dot.
    """
    joint = JointGraph.of(
        graph, num_forward_outputs=num_fwd_outputs, static_input_indices=static_lifetime_input_indices
    )
    forward, backward = joint.split(default_partition.saved_values(joint, fused=True))
    title = "joint graph, cut by default_partition"
    draw_graphs([CutGraph(joint, forward, backward)], Path(file_name), title=title, shape=dot_graph_shape)
    return forward, backward


def draw_graphs(graphs: Sequence[CutGraph], path: Path, *, title: str, shape: str | None = None) -> Path:
    """Draw cut graphs below each other into one .svg or .dot file, and return its path.

    Raises:
        ValueError: another suffix, or a shape for a file that is not .dot.
    """
    panels = [_panel(graph, number) for number, graph in enumerate(graphs)]
    return _write(path, panels, title=title, legend=_CUT_GRAPH, shape=shape)


def _panel(graph: CutGraph, number: int) -> _Panel:
    joint = graph.joint
    computed = {node.name for node in graph.forward.graph.nodes if node.op == "call_function"}
    # A parameter outlives the call anyway, so it does not count as saved.
    free = {node.name for node in joint.nodes if storage_of(node) in joint.static_inputs}
    saved = {node.name for node in graph.backward.graph.find_nodes(op="placeholder")} - free
    sizes = {node.name: num_bytes(node) for node in graph.forward.graph.nodes if node.name in saved}
    largest = max(sizes.values(), default=0) or 1
    left = {
        f"forward{number}.{node.name}": (_label(node), _RED if node.name in sizes else _GREY)
        for node in graph.forward.graph.nodes
        if node.op == "call_function" or node.name in sizes
    }
    right = {
        f"backward{number}.{node.name}": (_label(node), _BLUE if node.name in computed else _GREEN)
        for node in graph.backward.graph.nodes
        if node.op == "call_function"
    }
    edges = []
    for side, module in (("forward", graph.forward), ("backward", graph.backward)):
        for source in module.graph.nodes:
            crosses = side == "backward" and source.op == "placeholder" and source.name in sizes
            start = f"{'forward' if crosses else side}{number}.{source.name}"
            width = 0.6 + 2.4 * sizes[source.name] / largest if crosses else 0.0
            ends = (f"{side}{number}.{user.name}" for user in source.users)
            edges += [(start, end, width) for end in ends if {start, end} <= left.keys() | right.keys()]
    return _Panel(left, right, edges)


def _label(node: fx.Node) -> str:
    return f"{node.name}  {_op(node)}  {num_bytes(node):,} B"


def _op(node: fx.Node) -> str:
    return "input" if node.op == "placeholder" else str(node.target)


def _write(path: Path, panels: Sequence[_Panel], *, title: str, legend: Mapping[str, str], shape: str | None) -> Path:
    check_suffix(path, ".svg", ".dot")
    is_dot = path.suffix.lower() == ".dot"
    if shape is not None and not is_dot:
        raise ValueError(f"dot_graph_shape is for a .dot file, which Graphviz draws; got {shape!r} for {str(path)!r}")
    path.write_text(_dot(panels, title, shape or "box") if is_dot else _svg(panels, title, legend), encoding="utf-8")
    return path


def _dot(panels: Sequence[_Panel], title: str, shape: str) -> str:
    lines = [f"digraph {_quoted(title)} {{", f"  node [shape={_quoted(shape)}, fontsize=10, style=filled];"]
    for panel in panels:
        for name, (label, colour) in {**panel.left, **panel.right}.items():
            lines.append(f'  "{name}" [label={_quoted(label)}, fillcolor="{colour}"];')
        for start, end, width in panel.edges:
            style = f' [color="{_RED}", penwidth={width:.1f}, constraint=false]' if width else ""
            lines.append(f'  "{start}" -> "{end}"{style};')
    return "\n".join([*lines, "}"]) + "\n"


def _svg(panels: Sequence[_Panel], title: str, legend: Mapping[str, str]) -> str:
    lines = [f'<text x="20" y="20">{escape(title)}</text>']
    for index, (meaning, colour) in enumerate(legend.items()):
        lines.append(f'<text x="{20 + 170 * index}" y="40" style="fill:{colour}">&#9632; {meaning}</text>')
    top = 60.0
    for panel in panels:
        height = _ROW * max(len(panel.left), len(panel.right))
        at: dict[str, tuple[int, float, int]] = {}
        boxes = []
        for ops, (x, anchor, inwards) in ((panel.left, _LEFT), (panel.right, _RIGHT if panel.left else _ALONE)):
            for row, (name, (label, colour)) in enumerate(ops.items()):
                down = (row + 0.5) * height / len(ops)
                y = top + (height - down if panel.left and ops is panel.right else down)
                at[name] = (x, y, inwards)
                boxes.append(f'<rect x="{x - 4}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}"/>')
                place_of = f'x="{x - 10 * inwards}" y="{y + 3:.1f}" text-anchor="{anchor}"'
                boxes.append(f"<text {place_of}>{escape(label)}</text>")
        for start, end, width in panel.edges:
            (x, y, inwards), (to_x, to_y, _) = at[start], at[end]
            # An edge within one side is a curve, so that it does not cover the others.
            bend = (x + to_x) / 2 if x != to_x else x + inwards * min(12 + abs(to_y - y) / 4, 100)
            style = f'stroke="{_RED}" stroke-width="{width:.1f}"' if width else f'stroke="{_GREY}"'
            lines.append(f'<path d="M{x} {y:.1f}Q{bend:.1f} {(y + to_y) / 2:.1f} {to_x} {to_y:.1f}" {style}/>')
        lines += boxes
        top += height + 2 * _ROW
    style = "<style>text{font:9px sans-serif;fill:#343a40}path{fill:none}</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="1120" height="{top:.0f}">{style}'
    return "\n".join([head, *lines, "</svg>"]) + "\n"


def check_suffix(path: Path, *allowed: str) -> None:
    """Raise ValueError unless a picture's file has one of these suffixes."""
    if path.suffix.lower() not in allowed:
        raise ValueError(f"a picture's file must end in {' or '.join(allowed)}, got {str(path)!r}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'
