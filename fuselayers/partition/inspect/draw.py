"""draw -- a graph as an .svg picture, with a row for each node."""

from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

import torch
import torch.fx as fx

_GREY: Final = "#ced4da"
_KINDS: Final = {"returned": "#d1495b", "computed": _GREY, "input": "#95d5b2"}
_ROW, _X = 14, 120  # pixels: the height of an op's row, and the place of ops across


def draw_graph(
    traced: fx.GraphModule,
    fname: str | Path,
    figname: str = "fx_graph",
    clear_meta: bool = True,
) -> Path:
    """Draw one traced graph into an .svg file, and return the file's path. The names are functorch's.

    Args:
        traced: the graph; it is not changed.
        fname: the file; without a suffix it becomes an .svg.
        figname: the title.
        clear_meta: False adds dtype and shape to each value, where they are known.

    Raises:
        ValueError: another suffix.

    >>> import tempfile
    >>> graph = fx.symbolic_trace(lambda x: x.sin().cos())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_graph(graph, f"{folder}/waves").name
    'waves.svg'
    """
    path = Path(fname)
    path = path if path.suffix else path.with_suffix(".svg")
    if path.suffix.lower() != ".svg":
        raise ValueError(f"a picture's file must end in .svg, got {str(path)!r}")
    lines = [f'<text x="20" y="20">{escape(figname)}</text>']
    for index, (meaning, colour) in enumerate(_KINDS.items()):
        lines.append(f'<text x="{20 + 170 * index}" y="40" style="fill:{colour}">&#9632; {meaning}</text>')
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    at = {node: 60 + _ROW * (row + 0.5) for row, node in enumerate(nodes)}
    for source, y in at.items():
        for to_y in (at[user] for user in source.users if user in at):
            # A curve, so that it does not cover the nodes between.
            bend = _X - min(12 + abs(to_y - y) / 4, 100)
            lines.append(f'<path d="M{_X} {y:.1f}Q{bend:.1f} {(y + to_y) / 2:.1f} {_X} {to_y:.1f}" stroke="{_GREY}"/>')
    returned = set(traced.graph.output_node().all_input_nodes)
    for node, y in at.items():
        kind = "returned" if node in returned else "input" if node.op == "placeholder" else "computed"
        words = [node.name, "input" if node.op == "placeholder" else str(node.target)]
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not clear_meta:
            words.append(f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        lines.append(f'<rect x="{_X - 4}" y="{y - 4:.1f}" width="8" height="8" fill="{_KINDS[kind]}"/>')
        lines.append(f'<text x="{_X + 10}" y="{y + 3:.1f}">{escape("  ".join(words))}</text>')
    style = "<style>text{font:9px sans-serif;fill:#343a40}path{fill:none}</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="1120" height="{88 + _ROW * len(at)}">{style}'
    path.write_text("\n".join([head, *lines, "</svg>"]) + "\n", encoding="utf-8")
    return path
