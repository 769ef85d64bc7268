"""draw -- graphs as an .svg picture, or as a .dot file for Graphviz.

A picture of one graph has a row for each node. A picture of a cut graph has one for each op of each module, see
`draw_cut`; its .dot file has every node. `draw_graph` and `draw_joint_graph` are functorch's names.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

import torch
import torch.fx as fx

from .draw_cut import BLUE, GREEN, GREY, RED, module_of, saved_sizes, svg_of
from .joint_graph import CutGraph, JointGraph
from .node_kinds import num_bytes, source_line
from .partitioners import default_partition

_KINDS: Final = {"returned": RED, "computed": GREY, "input": GREEN}
_ROW, _X = 14, 120  # pixels for one op, and where ops are


class _Nodes(NamedTuple):
    """A graph: label and colour of each node, and edges, with the width of the line of a saved value, else 0."""

    nodes: Mapping[str, tuple[str, str]]
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
            ops[node.name] = ("  ".join(words), _KINDS[kind])
    edges = [(source.name, user.name, 0.0) for source in traced.graph.nodes for user in source.users]
    drawn = _Nodes(ops, [edge for edge in edges if edge[1] in ops])
    path = path if path.suffix else path.with_suffix(".svg")
    is_dot = _is_dot(path, dot_graph_shape)
    return _written(path, _dot([drawn], figname, dot_graph_shape) if is_dot else _svg(drawn, figname))


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
    if _is_dot(path, shape):
        return _written(path, _dot([_nodes_of(graph, number) for number, graph in enumerate(graphs)], title, shape))
    return _written(path, svg_of(graphs, title))


def _nodes_of(graph: CutGraph, number: int) -> _Nodes:
    computed = {node.name for node in graph.forward.graph.nodes if node.op == "call_function"}
    sizes = saved_sizes(graph)
    largest = max(sizes.values(), default=0) or 1
    nodes = {
        f"forward{number}.{node.name}": (_label(node), RED if node.name in sizes else GREY)
        for node in graph.forward.graph.nodes
        if node.op == "call_function" or node.name in sizes
    }
    nodes |= {
        f"backward{number}.{node.name}": (_label(node), BLUE if node.name in computed else GREEN)
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
            edges += [(start, end, width) for end in ends if {start, end} <= nodes.keys()]
    return _Nodes(nodes, edges)


def _label(node: fx.Node) -> str:
    return "  ".join(filter(None, (node.name, _op(node), module_of(node), f"{num_bytes(node):,} B")))


def _op(node: fx.Node) -> str:
    return "input" if node.op == "placeholder" else str(node.target)


def _is_dot(path: Path, shape: str | None) -> bool:
    check_suffix(path, ".svg", ".dot")
    is_dot = path.suffix.lower() == ".dot"
    if shape is not None and not is_dot:
        raise ValueError(f"dot_graph_shape is for a .dot file, which Graphviz draws; got {shape!r} for {str(path)!r}")
    return is_dot


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _dot(graphs: Sequence[_Nodes], title: str, shape: str | None) -> str:
    lines = [f"digraph {_quoted(title)} {{", f"  node [shape={_quoted(shape or 'box')}, fontsize=10, style=filled];"]
    for graph in graphs:
        for name, (label, colour) in graph.nodes.items():
            lines.append(f'  "{name}" [label={_quoted(label)}, fillcolor="{colour}"];')
        for start, end, width in graph.edges:
            style = f' [color="{RED}", penwidth={width:.1f}, constraint=false]' if width else ""
            lines.append(f'  "{start}" -> "{end}"{style};')
    return "\n".join([*lines, "}"]) + "\n"


def _svg(graph: _Nodes, title: str) -> str:
    """Return the picture of one graph: a row for each node, edges as curves on the left."""
    lines = [f'<text x="20" y="20">{escape(title)}</text>']
    for index, (meaning, colour) in enumerate(_KINDS.items()):
        lines.append(f'<text x="{20 + 170 * index}" y="40" style="fill:{colour}">&#9632; {meaning}</text>')
    at = {name: 60 + _ROW * (row + 0.5) for row, name in enumerate(graph.nodes)}
    for start, end, _ in graph.edges:
        y, to_y = at[start], at[end]
        # A curve, so that it does not cover the nodes between.
        bend = _X - min(12 + abs(to_y - y) / 4, 100)
        lines.append(f'<path d="M{_X} {y:.1f}Q{bend:.1f} {(y + to_y) / 2:.1f} {_X} {to_y:.1f}" stroke="{GREY}"/>')
    for name, (label, colour) in graph.nodes.items():
        lines.append(f'<rect x="{_X - 4}" y="{at[name] - 4:.1f}" width="8" height="8" fill="{colour}"/>')
        lines.append(f'<text x="{_X + 10}" y="{at[name] + 3:.1f}">{escape(label)}</text>')
    style = "<style>text{font:9px sans-serif;fill:#343a40}path{fill:none}</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="1120" height="{88 + _ROW * len(at)}">{style}'
    return "\n".join([head, *lines, "</svg>"]) + "\n"


def check_suffix(path: Path, *allowed: str) -> None:
    """Raise ValueError unless a picture's file has one of these suffixes."""
    if path.suffix.lower() not in allowed:
        raise ValueError(f"a picture's file must end in {' or '.join(allowed)}, got {str(path)!r}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'
