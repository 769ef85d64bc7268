"""Draws what `python -m benchmarks.partition --json FILE` measured: pictures beside FILE, from nothing but that file.

python -m benchmarks.partition --json plots/cpu/intel_xeon_avx512/partition.json
python plots/partition.py plots/cpu/intel_xeon_avx512/partition.json
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["draw", "main"]


def draw(path: Path) -> list[Path]:
    """Draw the sections of one measurement that have a picture: `saved` as bars, `budget` as a curve.

    Args:
        path: a file that `python -m benchmarks.partition --json` wrote.

    Returns:
        The pictures' paths: NAME_saved.png and NAME_budget.png beside NAME.json.

    Raises:
        ValueError: the file is something else, or has neither section.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or not {"machine", "date", "sections"} <= content.keys():
        raise ValueError(
            f"{path} was not written by `python -m benchmarks.partition --json`: it lacks machine, date or sections"
        )
    drawers = {"saved": _draw_saved, "budget": _draw_budget}
    chosen = [name for name in drawers if name in content["sections"]]
    if not chosen:
        raise ValueError(f"{path} has no section saved or budget; measure with --only saved,budget")
    pictures = []
    for name in chosen:
        figure = Figure(figsize=(9, 4.8), layout="constrained")
        axes = figure.add_subplot()
        drawers[name](axes, content["sections"][name])
        figure.supxlabel(f"{content['machine']}, {content['date']}", fontsize=7)
        picture = path.with_name(f"{path.stem}_{name}.png")
        FigureCanvasAgg(figure).print_png(picture)
        pictures.append(picture)
    return pictures


def _draw_saved(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    colours = {"eager": "#6c757d", "torch.compile": "#2e86ab", "fuse": "#d1495b"}
    for place, (implementation, colour) in enumerate(colours.items()):
        positions = [number + (place - 1) * 0.27 for number in range(len(rows))]
        bars = axes.bar(positions, [row[implementation] for row in rows], 0.25, label=implementation, color=colour)
        axes.bar_label(bars, [f"{row[implementation]:.1f}" for row in rows], fontsize=7)
    axes.set_xticks(range(len(rows)), [f"{row['layer']}\n{row['dtype']}" for row in rows], fontsize=7)
    axes.set_ylabel("saved for backward, in batch x tokens x hidden x itemsize", fontsize=8)
    axes.set_title("What one layer saves for backward, dropout 0.1", fontsize=10)
    axes.legend()


def _draw_budget(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for implementation, marker, colour in (("torch", "o", "#2e86ab"), ("fuse", "x", "#d1495b")):
        points = [row for row in rows if row[f"{implementation} units"] != "-"]  # fuse cannot do with every budget
        units = [row[f"{implementation} units"] for row in points]
        flops = [row[f"{implementation} FLOPs %"] for row in points]
        label = "torch, activation_memory_budget" if implementation == "torch" else "fuse, budget(torch's bytes)"
        axes.plot(units, flops, marker, linestyle="-", color=colour, label=label, alpha=0.8)
    axes.set_xlabel("units kept per layer")
    axes.set_ylabel("% of forward's FLOPs run again")
    axes.set_title("Memory against recompute", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()


def main(arguments: Sequence[str]) -> int:
    """Draw every file named; without one, say how to call it."""
    if not arguments:
        print("usage: python plots/partition.py FILE.json ...", file=sys.stderr)
        return 2
    for argument in arguments:
        try:
            print(*draw(Path(argument)), sep="\n")
        except (OSError, ValueError) as error:
            print(f"plots/partition.py: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
