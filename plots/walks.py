"""Draws the ways of the data through the code, docs/pictures/walk_*.svg: the functions that a call passes, by file.

python plots/walks.py            # all of them, again
python plots/walks.py /tmp       # into another folder

A test makes each call, and compares the functions that ran with the picture.
"""

import itertools
import sys
from pathlib import Path
from typing import Final, NamedTuple

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

__all__ = ["FOLDER", "WALKS", "Step", "draw"]

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"

_LINE: Final = "#808080"  # shows on light and dark pages
_INK: Final = "#212529"
_BOX: Final = "#cfe8ef"
_WIDTH: Final = 9.0  # inches
_ROW: Final = 0.34
_HALF_HEIGHT: Final = 0.32  # of a row
_HALF_WIDTH: Final = 0.47  # of a column


class Step(NamedTuple):
    """A function that a walk passes, or a step of torch between two of them.

    Attributes:
        file: its path in the package; "torch" for a step of torch.
        function: its qualified name; in words for a step of torch.
    """

    file: str
    function: str


def _steps(*lines: str) -> tuple[Step, ...]:
    return tuple(Step(*line.split(maxsplit=1)) for line in lines)


WALKS: Final[dict[str, tuple[Step, ...]]] = {
    "fused_step": _steps(
        "partition/fused_function.py FusedFunction.__call__",
        "torch Dynamo traces the calls",
        "partition/fused_function.py FusedFunction._compile.<locals>.compile_graph",
        "partition/backends.py compile_chain",
        "partition/compilers/eager.py compile_eager",
        "partition/cut.py before_trace",
        "torch AOTAutograd traces",
        "partition/cut.py before_cut",
        "partition/choose/partitioners.py SavePolicy.__call__",
        "partition/cut.py joint_graph_of",
        "partition/choose/partitioners.py SavePolicy.saved_values",
        "partition/choose/min_cut.py saved_by_min_cut",
        "partition/cut.py split",
        "partition/cut.py before_run",
        "torch runs the two graphs",
    ),
    "op": _steps(
        "ops/bias_activation_dropout.py bias_activation_dropout",
        "ops/draw.py seed_or_draw",
        "ops/implementations/dispatch.py Op.__call__",
        "ops/elementwise.py _Elementwise.forward",
        "ops/elementwise.py _launch_forward",
        "ops/cpu/library.py run",
        "torch calls backward",
        "ops/elementwise.py _Elementwise.backward",
        "ops/elementwise.py _launch_backward",
        "ops/cpu/library.py run",
    ),
}
"""The step of a fused model that compiles, on the backend "eager"; and a call of an op on a CPU, with its backward."""


def draw(folder: Path = FOLDER) -> list[Path]:
    """Draw every walk into a folder, and return the files."""
    files = []
    for name, steps in WALKS.items():
        path = folder / f"walk_{name}.svg"
        with rc_context({"svg.hashsalt": "fuselayers", "svg.fonttype": "none", "font.family": "sans-serif"}):
            FigureCanvasSVG(_drawn(steps)).print_svg(path, metadata={"Date": None, "Creator": None})
        files.append(path)
    return files


def _drawn(steps: tuple[Step, ...]) -> Figure:
    """A column for each file, and a row for each step."""
    files = list(dict.fromkeys(step.file for step in steps))
    figure = Figure(figsize=(_WIDTH, (len(steps) + 1.5) * _ROW), facecolor="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.5, len(files) - 0.5)
    axes.set_ylim(len(steps) + 0.5, -1)
    axes.axis("off")
    for column, file in enumerate(files):
        folder, _, name = file.rpartition("/")
        words = f"{folder}/\n{name}" if folder else name
        axes.text(column, -0.4, words, fontsize=6.5, weight="bold", ha="center", va="center", color=_LINE)
        axes.plot((column, column), (0.2, len(steps) + 0.4), color=_LINE, linewidth=0.4, linestyle=":", zorder=0)
    places = [(files.index(step.file), row + 0.8) for row, step in enumerate(steps)]
    for step, (column, row) in zip(steps, places, strict=True):
        of_torch = step.file == "torch"
        corner, sides = (column - _HALF_WIDTH, row - _HALF_HEIGHT), (2 * _HALF_WIDTH, 2 * _HALF_HEIGHT)
        axes.add_patch(
            Rectangle(corner, *sides, linewidth=0.7, facecolor="#e9ecef" if of_torch else _BOX, edgecolor=_LINE)
        )
        words = step.function if of_torch else step.function.rpartition(".")[2]
        axes.text(column, row, words, fontsize=6, ha="center", va="center", color=_INK, parse_math=False)
    for (x, y), (next_x, next_y) in itertools.pairwise(places):
        shape = {"arrowstyle": "-|>", "color": _LINE, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
        if x == next_x:
            start, end = (x, y + _HALF_HEIGHT), (next_x, next_y - _HALF_HEIGHT)
        else:
            side = _HALF_WIDTH if next_x > x else -_HALF_WIDTH
            start, end = (x + side, y), (next_x, next_y - _HALF_HEIGHT)
            axes.plot((start[0], end[0]), (y, y), color=_LINE, linewidth=0.8)
            start = (next_x, y)
        axes.annotate("", xy=end, xytext=start, arrowprops=shape)
    return figure


if __name__ == "__main__":
    print(*draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER), sep="\n")
