"""Draws the ways of the data through the files, docs/pictures/walk_*.svg; nothing in them is measured.

python plots/walks.py            # all of them, again
python plots/walks.py /tmp       # into another folder

A column stands for a package or a part of it; an arrow is a call. tests/plots/test_walks.py finds each
call in the code.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from plots.components import BOX, FOLDER, GROUND, INK, LINE, draw

__all__ = ["PICTURES", "WALKS", "Step"]


class Step(NamedTuple):
    """One function on the way.

    Attributes:
        file: its file, from `fuselayers` on.
        function: its name, with its class.
        says: what it does.
        calls: the numbers of the steps that it calls.
        column: the title of its column; by default its package.
        by_name: whether it is called by its registered name, so that no caller names it in the code.
    """

    file: str
    function: str
    says: str
    calls: tuple[int, ...] = ()
    column: str = ""
    by_name: bool = False


_CALL, _RULES, _CHECKS = "components/swap", "the rules", "the checks"

WALKS: Final[Mapping[str, Sequence[Step]]] = MappingProxyType(
    {
        "build": (
            Step("configs/build.py", "build", 'build("gpt_nano", [...])', (1, 7, 10)),
            Step("configs/build.py", "compose", "the frozen config", (2, 3, 4, 5, 6)),
            Step("configs/build.py", "read_source", "a name, a file, a mapping"),
            Step("configs/build.py", "parse_overrides", "in Hydra's grammar"),
            Step("configs/group_files.py", "composed_files", "Hydra joins the YAML files"),
            Step("configs/sections.py", "changed", "another choice drops options"),
            Step("configs/sections.py", "finished", "plain values, each judged", (8,)),
            Step("components/option.py", "create", "a component by its name", (8, 9)),
            Step("components/option.py", "judged", "names, types, ranges"),
            Step("components/model/stack.py", "Stack.__init__", "makes its parts likewise", by_name=True),
            Step("configs/build.py", "fuse_as", "the scope of fusion", (11,)),
            Step("partition/fuse.py", "fuse_in_place", "equal blocks share graphs", (12,)),
            Step("partition/fused_module.py", "with_forward", "a class with a fused forward"),
        ),
        "swap": (
            Step("components/swap/call.py", "swap", "swap(model, batch=...)", (1, 6, 11), _CALL),
            Step("components/swap/call.py", "_Search.plan", "a class for each module that fits", (2, 4), _CALL),
            Step("components/swap/rule.py", "Rule.match", "compares forwards and parts", (3,), _RULES),
            Step("components/swap/forms.py", "form_of", "the normal form of a forward", (), _RULES),
            Step("components/swap/layer.py", "swapped_class", "the rule's forward, or its own", (5,), _RULES),
            Step("module_class.py", "subclass", "same name, copied and pickled", (), "beside the packages"),
            Step("components/swap/call.py", "_best", "the level that saves less", (7, 8), _CALL),
            Step("components/swap/verify.py", "inputs_of_sites", "one call of the model", (), _CHECKS),
            Step("components/swap/call.py", "_verified", "without what is not verified", (9, 10), _CALL),
            Step("components/swap/verify.py", "check", "against the original, in float64", (), _CHECKS),
            Step("components/swap/verify.py", "saved_by_model", "bytes kept for backward", (), _CHECKS),
            Step("components/swap/call.py", "_Plan.put_into", "the modules get their classes", (), _CALL),
        ),
    }
)

_COLUMN: Final = 3.0  # inches
_ROW: Final = 0.62
_WIDTH, _HEIGHT = 2.45, 0.46  # of a box
_LEFT, _TOP = 0.35, 0.34


def _column(step: Step) -> str:
    return step.column or step.file.rpartition("/")[0]


def _picture(walk: Sequence[Step]) -> Figure:
    """Return the picture of a walk: its columns are in the order in which they are entered."""
    columns = list(dict.fromkeys(map(_column, walk)))
    corners = [
        (columns.index(_column(step)) * _COLUMN + _LEFT, number * _ROW + _TOP) for number, step in enumerate(walk)
    ]
    width, height = len(columns) * _COLUMN, len(walk) * _ROW + _TOP
    figure = Figure(figsize=(width, height), facecolor=GROUND)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for index, name in enumerate(columns):
        axes.text(index * _COLUMN + _LEFT, 0.2, name, fontsize=9, weight="bold", color=LINE)
    for number, step in enumerate(walk):
        for called in step.calls:
            points = _arrow(corners[number], corners[called], is_next=called == number + 1, lane=number % 5)
            axes.plot(*zip(*points[:-1], strict=True), color=LINE, linewidth=0.9)
            shape = {"arrowstyle": "-|>", "color": LINE, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", xy=points[-1], xytext=points[-2], arrowprops=shape)
    for (x, y), step in zip(corners, walk, strict=True):
        axes.add_patch(Rectangle((x, y), _WIDTH, _HEIGHT, linewidth=0.8, facecolor=BOX, edgecolor=LINE))
        name = f"{step.file.rpartition('/')[2]}: {step.function}"
        axes.text(x + 0.08, y + 0.17, name, fontsize=8, weight="bold", color=INK, va="center", parse_math=False)
        axes.text(x + 0.08, y + 0.34, step.says, fontsize=8, color=INK, va="center", parse_math=False)
    return figure


def _arrow(
    start: tuple[float, float], end: tuple[float, float], *, is_next: bool, lane: int
) -> list[tuple[float, float]]:
    """Return the corners of an arrow from a box to another, given their upper left corners.

    It enters from the left, along a lane, so that arrows from several boxes run side by side.
    """
    (x, y), (to_x, to_y) = start, end
    if is_next and x == to_x:
        return [(x + 0.4, y + _HEIGHT), (x + 0.4, to_y)]
    at = to_x - 0.09 - 0.05 * lane
    if x == to_x:
        return [(x, y + 0.36), (at, y + 0.36), (at, to_y + 0.23), (x, to_y + 0.23)]
    edge = x + _WIDTH if to_x > x else x
    return [(edge, y + 0.23), (at, y + 0.23), (at, to_y + 0.23), (to_x, to_y + 0.23)]


PICTURES: Final[dict[str, Callable[[], Figure]]] = {
    f"walk_{name}": functools.partial(_picture, walk) for name, walk in WALKS.items()
}


if __name__ == "__main__":
    print(*draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, PICTURES), sep="\n")
