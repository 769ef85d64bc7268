"""The picture of cut graphs: forward on the left, where time runs down, backward on the right, where time runs up.

A row is an op whose value is saved, or the ops of a module between two of these, each with all nodes that it was traced
into; views have no row. Rows are grouped by the numbered
module that they are in, such as `blocks.0`, and neighbours that look the same are drawn once. So a model of any depth
has a picture of about the same height. A red line is a saved value: the wider the line, the larger the value.
"""

import math
import operator
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

import torch
import torch.fx as fx

from .joint_graph import CutGraph
from .node_kinds import looks_at_its_input, num_bytes, storage_of
from .passes import AGAIN

RED, BLUE, GREY, GREEN = "#d1495b", "#74b3ce", "#ced4da", "#95d5b2"
_WIDTH, _LEFT, _RIGHT, _ROW = 1120, 430, 690, 16
_LONGEST: Final = 50  # characters for the ops of a row
_LEGEND: Final = {
    "saved for backward": RED,
    "computed in forward, not saved": GREY,
    "recomputed in backward": BLUE,
    "gradients": GREEN,
}
_STYLE: Final = (
    "text{font:11px sans-serif;fill:#212529}.module{fill:#6c757d}.title{font-weight:bold}path{fill:none}"
    f".saved{{fill:{RED}}}"
)


@dataclass(eq=False)
class _Row:
    """Nodes that follow each other and were traced from the same module; if a value is saved, from the same op."""

    module: str
    ops: list[str]
    colour: str
    nodes: list[fx.Node] = field(default_factory=list)
    saved: dict[fx.Node, int] = field(default_factory=dict)  # with their bytes, each storage once

    @property
    def num_bytes(self) -> int:
        return sum(self.saved.values())


@dataclass(eq=False)
class _Section:
    """The rows of a numbered module, such as blocks.0; or of what stands before, between or after those."""

    path: str
    forward: list[_Row] = field(default_factory=list)
    backward: list[_Row] = field(default_factory=list)

    def looks(self) -> object:
        """Return what two sections have in common if one picture serves both."""
        rows = [
            [(row.module.removeprefix(self.path), row.ops, row.colour, row.num_bytes) for row in side]
            for side in (self.forward, self.backward)
        ]
        return self.path and self.path.rpartition(".")[0], rows


@dataclass(frozen=True)
class _Cut:
    """The sections of a graph, from the first of forward to the last, and the saved values from row to row."""

    sections: list[_Section]
    edges: dict[tuple[_Row, _Row], int]


def svg_of(graphs: Sequence[CutGraph], title: str) -> str:
    """Return the picture of cut graphs, one below the other."""
    lines = [f'<text x="20" y="20" class="title">{escape(title)}</text>']
    for index, (meaning, colour) in enumerate(_LEGEND.items()):
        lines.append(f'<rect x="{20 + 200 * index}" y="32" width="8" height="8" fill="{colour}"/>')
        lines.append(f'<text x="{32 + 200 * index}" y="40">{meaning}</text>')
    top = 56
    for graph in graphs:
        lines.append(f'<text x="{_LEFT}" y="{top + 12}" text-anchor="end" class="title">forward, time runs down</text>')
        lines.append(f'<text x="{_RIGHT}" y="{top + 12}" class="title">backward, time runs up</text>')
        drawn, top = _drawn(_cut_of(graph), top + 24)
        lines += drawn
    size = f'width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{top}" fill="white"/>', *lines, "</svg>"]) + "\n"


def module_of(node: fx.Node) -> str:
    """Return the path of the module whose forward, or its backward, made the node, as "blocks.0.norm"; "" for none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", list(stack.values())[-1][0])
    return re.sub(r"^L\['\w+'\]\.?", "", path)


def op_of(node: fx.Node) -> str:
    """Return the op that the user's code called, which may have become several nodes, as "layer_norm"."""
    if node.op == "placeholder":
        value = node.meta.get("val")
        return f"input {list(value.shape)}" if isinstance(value, torch.Tensor) else "input"
    traced_from = node.meta.get("original_aten", node.target)
    if isinstance(traced_from, torch._ops.OpOverload):
        return traced_from._schema.name.partition("::")[2].removeprefix("_").removeprefix("native_")
    return str(getattr(traced_from, "__name__", traced_from))


def readable_bytes(size: float) -> str:
    """Return a size in bytes as text.

    >>> readable_bytes(12_582_912), readable_bytes(8)
    ('12.6 MB', '8 B')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:.0f} B"


def saved_sizes(graph: CutGraph) -> dict[str, int]:
    """Return the bytes of each saved value by its name; a further view of the same memory counts nothing."""
    joint = graph.joint
    # A parameter outlives the call anyway, so it does not count as saved.
    free = {node.name for node in joint.nodes if storage_of(node) in joint.static_inputs}
    saved = {node.name for node in graph.backward.graph.find_nodes(op="placeholder")} - free
    sizes: dict[str, int] = {}
    counted: set[fx.Node] = set()
    for node in graph.forward.graph.nodes:
        if node.name in saved:
            storage = storage_of(node)
            sizes[node.name] = 0 if storage in counted else num_bytes(storage)
            counted.add(storage)
    return sizes


def _is_part_of_another(node: fx.Node) -> bool:
    return node.target is operator.getitem or looks_at_its_input(node)


def _numbered(path: str) -> str:
    """Return the path up to its first number: "blocks.0.norms.1" -> "blocks.0", "head" -> ""."""
    found = re.match(r"(?:.*?\.)??\d+(?=\.|$)", path)
    return found[0] if found else ""


def _cut_of(graph: CutGraph) -> _Cut:
    sizes = saved_sizes(graph)
    sections: list[_Section] = []
    of_number: dict[str, _Section] = {}
    row_of: dict[str, _Row] = {}
    for node in graph.forward.graph.nodes:
        if node.op == "call_function" and _is_part_of_another(node) and node.all_input_nodes:
            row = row_of.get(node.all_input_nodes[0].name)
        elif node.op == "call_function" or node.name in sizes:
            module = module_of(node)
            number = _numbered(module)
            if not sections or (sections[-1].path != number and number not in of_number):
                sections.append(_Section(number))
            if number:
                of_number.setdefault(number, sections[-1])
            row = _row_for(node, module, (of_number.get(number) or sections[-1]).forward, GREY)
        else:
            row = None
        if row is not None:
            row_of[node.name] = row
            if node.name in sizes:
                row.saved[node], row.colour = sizes[node.name], RED
    if not sections:
        sections.append(_Section(""))
    reads = _add_backward(graph, sections)
    merged: dict[_Row, _Row] = {}
    for section in sections:
        section.forward, section.backward = _merged(section.forward, merged), _merged(section.backward, merged)
    edges: dict[tuple[_Row, _Row], int] = {}
    for name, reader in reads:
        if name in sizes and name in row_of:
            ends = merged[row_of[name]], merged[reader]
            edges[ends] = max(sizes[name], edges.get(ends, 0))
    return _Cut(sections, edges)


def _merged(rows: list[_Row], merged: dict[_Row, _Row]) -> list[_Row]:
    """Return the rows, neighbours of one module and colour as one, unless a value is saved. Fill the map to these."""
    result: list[_Row] = []
    for row in rows:
        last = result[-1] if result else None
        if last is not None and (last.module, last.colour) == (row.module, row.colour) and row.colour != RED:
            last.ops += [op for op in row.ops if op not in last.ops]
            last.nodes += row.nodes
        else:
            result.append(last := row)
        merged[row] = last
    return result


def _add_backward(graph: CutGraph, sections: list[_Section]) -> list[tuple[str, _Row]]:
    """Put each op of backward into the section of its module. Return the saved values by name, with their readers."""
    forward = {node.name for node in graph.forward.graph.nodes if node.op == "call_function"}
    homes: dict[str, list[int]] = {}
    for place, section in enumerate(sections):
        for row in section.forward:
            homes.setdefault(row.module, []).append(place)
    reads: list[tuple[str, _Row]] = []
    behind: dict[fx.Node, list[str]] = {}  # the saved values that a node is, or is a view of
    place = len(sections) - 1
    for node in graph.backward.graph.nodes:
        sources = [name for source in node.all_input_nodes for name in behind.get(source, ())]
        if node.op == "placeholder":
            behind[node] = [node.name]
        elif node.op == "call_function" and _is_part_of_another(node):
            behind[node] = sources
        elif node.op == "call_function":
            module = module_of(node)
            # A module may stand in several sections, such as the model itself. Backward goes up.
            there = homes.get(module) or [at for at, one in enumerate(sections) if one.path == _numbered(module)]
            if place not in there and there:
                place = max((at for at in there if at <= place), default=min(there))
            colour = BLUE if node.name.removesuffix(AGAIN) in forward else GREEN
            row = _row_for(node, module, sections[place].backward, colour)
            reads += [(name, row) for name in sources]
    return reads


def _row_for(node: fx.Node, module: str, rows: list[_Row], colour: str) -> _Row:
    """Return the last row if the node belongs to it, else a new one."""
    op = op_of(node)
    last = rows[-1] if rows else None
    same = (
        last is not None
        and node.op != "placeholder"
        and (last.module, last.ops) == (module, [op])
        and colour in (last.colour, GREY)
    )
    if last is None or not same:
        rows.append(last := _Row(module, [op], colour))
    last.nodes.append(node)
    return last


def _drawn(cut: _Cut, top: int) -> tuple[list[str], int]:
    """Return the lines of a picture and where it ends; sections that look the same are drawn once."""
    groups: list[list[_Section]] = []
    for section in cut.sections:
        if groups and section.path and groups[-1][0].looks() == section.looks():
            groups[-1].append(section)
        else:
            groups.append([section])
    at: dict[_Row, tuple[int, float]] = {}
    shapes: list[str] = []
    for group in groups:
        first = group[0]
        height = _ROW * max(len(first.forward), len(first.backward), 1) + (24 if first.path else 8)
        shapes.append(
            f'<rect x="10" y="{top}" width="{_WIDTH - 20}" height="{height}" rx="4" fill="none" stroke="{GREY}"/>'
        )
        if first.path:
            shapes.append(f'<text x="20" y="{top + 15}" class="title">{escape(_title(group))}</text>')
        begin, room = top + (20 if first.path else 4), height - (24 if first.path else 8)
        for rows, x in ((first.forward, _LEFT), (first.backward[::-1], _RIGHT)):
            for number, row in enumerate(rows):
                y = begin + (number + 0.5) * room / len(rows)
                shapes += _row_shapes(row, x, y, below=first.path)
                at[row] = x, y
        for other in group[1:]:
            for rows, others in ((first.forward, other.forward), (first.backward, other.backward)):
                at |= {row: at[drawn] for drawn, row in zip(rows, others, strict=True)}
        top += height + 8
    largest = max(cut.edges.values(), default=0) or 1
    widths: dict[str, float] = {}
    for (source, reader), size in cut.edges.items():
        (x, y), (to_x, to_y) = at[source], at[reader]
        path = f"M{x + 6} {y:.1f}C{x + 110} {y:.1f} {to_x - 110} {to_y:.1f} {to_x - 6} {to_y:.1f}"
        widths[path] = max(widths.get(path, 0.0), 0.6 + 2.4 * math.sqrt(size / largest))
    lines = [f'<path d="{path}" stroke="{RED}" stroke-width="{width:.1f}"/>' for path, width in widths.items()]
    return [*lines, *shapes], top + 8


def _title(group: list[_Section]) -> str:
    first, last = group[0], group[-1]
    saves = f"saves {readable_bytes(sum(row.num_bytes for row in first.forward))}"
    if len(group) == 1:
        return f"{first.path}: {saves}"
    return f"{first.path} to {last.path}: {len(group)} times, each {saves}"


def _row_shapes(row: _Row, x: int, y: float, *, below: str) -> list[str]:
    module = row.module.removeprefix(below).removeprefix(".")
    # Titles are what a pointer over the row shows.
    names = "\n".join(_described(node, row.saved.get(node)) for node in dict.fromkeys((*row.nodes, *row.saved)))
    words = [f'<tspan class="module">{escape(module)}</tspan>'] if module else []
    # The first op is named, however long.
    room = max(_LONGEST, len(row.ops[0]) + len(", ..."))
    words.append(escape(textwrap.shorten(", ".join(row.ops), room, placeholder=" ...")))
    if row.num_bytes:
        words.append(f'<tspan class="saved">{readable_bytes(row.num_bytes)}</tspan>')
    anchor, offset = ("end", -10) if x == _LEFT else ("start", 10)
    content = f"{' '.join(words)}<title>{escape(names)}</title>"
    return [
        f'<rect x="{x - 4}" y="{y - 4:.1f}" width="8" height="8" fill="{row.colour}"/>',
        f'<text x="{x + offset}" y="{y + 4:.1f}" text-anchor="{anchor}">{content}</text>',
    ]


def _described(node: fx.Node, size: int | None) -> str:
    value = node.meta.get("val")
    kind = f" {str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"{node.name}: {node.target}{kind}" + ("" if size is None else f", saved, {readable_bytes(size)}")
