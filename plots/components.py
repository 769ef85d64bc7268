"""Draws the pictures of the pages on components, docs/pictures/*.svg; nothing in them is measured.

python plots/components.py            # all of them, again
python plots/components.py /tmp       # into another folder
"""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fuselayers.ops import ACTIVATIONS, activate

__all__ = ["BOX", "FOLDER", "GROUND", "INK", "LINE", "PICTURES", "draw"]

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"

# A transparent background, and a grey that shows on light and dark pages. Boxes are light, and the words in them dark.
GROUND: Final = "none"
LINE: Final = "#808080"
INK: Final = "#212529"
BOX: Final = "#e9ecef"
_COLOURS: Final = {
    "plain": BOX,  # a step without weights
    "weights": "#cfe8ef",  # a step with weights
    "part": "#f8d7da",  # a component that another page describes
}
_COLUMN: Final = 1.0  # inches
_ROW: Final = 0.5
_HALF_WIDTH: Final = 0.43  # of a column
_HALF_HEIGHT: Final = 0.29  # of a row
_WORD: Final = 0.22  # half the space of a word without a box


class _Place(NamedTuple):
    """The middle of a box, and how far it reaches to each side."""

    x: float
    y: float
    width: float
    height: float


class _Diagram:
    """Boxes on a grid, and arrows between them; the column 0 is at the left, the row 0 on top."""

    def __init__(self, columns: float, rows: float) -> None:
        self.figure = Figure(figsize=(columns * _COLUMN, rows * _ROW), facecolor=GROUND)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(-0.5, columns - 0.5)
        self.axes.set_ylim(rows - 0.5, -0.5)
        self.axes.axis("off")

    def box(self, column: float, row: float, text: str, kind: str = "plain") -> _Place:
        """Draw a box and return its place, for arrows."""
        self.text(column, row, text, colour=LINE if kind == "name" else INK)
        if kind == "name":
            return _Place(column, row, _WORD, _WORD)
        height = _HALF_HEIGHT * (1.35 if "\n" in text else 1)
        corner, sides = (column - _HALF_WIDTH, row - height), (2 * _HALF_WIDTH, 2 * height)
        self.axes.add_patch(Rectangle(corner, *sides, linewidth=0.8, facecolor=_COLOURS[kind], edgecolor=LINE))
        return _Place(column, row, _HALF_WIDTH, height)

    def text(
        self, column: float, row: float, text: str, *, bold: bool = False, left: bool = False, colour: str = LINE
    ) -> None:
        """Write a text in the middle of a place, or from its left edge on."""
        self.axes.text(
            column - _HALF_WIDTH if left else column,
            row,
            text,
            fontsize=8,
            weight="bold" if bold else "normal",
            ha="left" if left else "center",
            va="center",
            color=colour,
            parse_math=False,
        )

    def arrow(
        self, start: _Place, end: _Place, *, over: bool = False, elbow: bool = False, slanted: bool = False
    ) -> None:
        """Draw an arrow from box to box.

        Args:
            start: a box.
            end: another.
            over: from top to top, around the boxes in between.
            elbow: along a column and then a row, or the other way, so that it avoids the boxes' corners.
            slanted: straight from side to side, between two rows; else along a row or a column.
        """
        down = 1 if end.y > start.y else -1
        left, right = end.x - end.width, start.x + start.width
        if over:
            # The arrow into a box and the arrow out of it end side by side.
            above, leaves, arrives = start.y - 0.6, start.x + 0.3 * start.width, end.x - 0.3 * end.width
            points = [
                (leaves, start.y - start.height),
                (leaves, above),
                (arrives, above),
                (arrives, end.y - end.height),
            ]
        elif elbow and end.y > start.y:
            side = left if end.x > start.x else end.x + end.width
            points = [(start.x, start.y + start.height), (start.x, end.y), (side, end.y)]
        elif elbow:
            points = [(right, start.y), (end.x, start.y), (end.x, end.y + end.height)]
        elif slanted or start.y == end.y:
            points = [(right, start.y), (left, end.y)]
        else:
            points = [(start.x, start.y + down * start.height), (end.x, end.y - down * end.height)]
        xs, ys = zip(*points[:-1], strict=True)
        self.axes.plot(xs, ys, color=LINE, linewidth=0.9)
        shape = {"arrowstyle": "-|>", "color": LINE, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", xy=points[-1], xytext=points[-2], arrowprops=shape)

    def chain(self, row: float, steps: Sequence[tuple[str, str]], *, first: float = 0, title: str = "") -> list[_Place]:
        """Draw boxes one after the other in a row, each with an arrow to the next, and return their places."""
        if title:
            self.text(0, row, title, bold=True, left=True)
        places = [self.box(first + number, row, text, kind) for number, (text, kind) in enumerate(steps)]
        for start, end in itertools.pairwise(places):
            self.arrow(start, end)
        return places


def _feedforward() -> Figure:
    x, y, drop, act = ("x", "name"), ("y", "name"), ("dropout", "plain"), ("activation", "plain")
    up, down = ("up", "weights"), ("down", "weights")
    drawn = _Diagram(8, 8.4)
    drawn.chain(0.3, [x, up, act, drop, down, y], first=1, title="mlp, fused_mlp")
    drawn.chain(1.6, [x, up, ("convolution\nover tokens", "weights"), act, drop, down, y], first=1, title="conv_mlp")
    row = 3.1
    places = drawn.chain(
        row, [x, ("gate", "weights"), act, ("times", "plain"), drop, down, y], first=1, title="gated_mlp"
    )
    upper = drawn.box(2, row + 1, *up)
    drawn.arrow(places[0], upper, elbow=True)
    drawn.arrow(upper, places[3], elbow=True)
    row = 5.2
    drawn.text(0, row + 1, "mixture_of\n_experts", bold=True, left=True)
    start, router = drawn.box(1, row + 1, *x), drawn.box(2, row + 1, "router", "weights")
    end, total = drawn.box(6, row + 1, *y), drawn.box(5, row + 1, "weighted\nsum")
    drawn.arrow(start, router)
    drawn.arrow(total, end)
    for number, text in enumerate(("expert 1", "expert 2", "expert E")):
        expert = drawn.box(3.5, row + number, text, "part")
        drawn.arrow(router, expert, slanted=True)
        drawn.arrow(expert, total, slanted=True)
    return drawn.figure


def _norm() -> Figure:
    x, y, weight = ("x", "name"), ("y", "name"), ("times\nweight", "weights")
    drawn = _Diagram(7, 5.3)
    minus = ("less its\nmean", "plain")
    deviation, square = ("over its\ndeviation", "plain"), ("over its root\nmean square", "plain")
    drawn.chain(0.3, [x, minus, deviation, weight, ("plus bias", "weights"), y], first=1, title="layer_norm")
    drawn.chain(1.7, [x, square, weight, y], first=1, title="rms_norm")
    steepness = ("times\nalpha", "weights")
    drawn.chain(3.1, [x, steepness, ("tanh", "plain"), weight, ("plus bias", "weights"), y], first=1, title="dyt")
    drawn.chain(4.4, [x, y], first=1, title="skip")
    return drawn.figure


def _residual() -> Figure:
    norm, layer, add, x = ("norm", "weights"), ("sublayer", "part"), ("+", "plain"), ("x", "name")
    drawn = _Diagram(7, 9)
    places = drawn.chain(0.6, [x, norm, layer, add, ("x", "name")], first=1, title="pre")
    drawn.arrow(places[0], places[3], over=True)
    places = drawn.chain(2.2, [x, layer, add, norm, ("x", "name")], first=1, title="post")
    drawn.arrow(places[0], places[2], over=True)
    places = drawn.chain(3.8, [x, layer, add, norm, ("x", "name")], first=1, title="deepnorm")
    drawn.arrow(places[0], places[2], over=True)
    drawn.text(2, 3.8 - 0.8, "times alpha")
    places = drawn.chain(5.4, [x, norm, layer, norm, add, ("x", "name")], first=1, title="sandwich")
    drawn.arrow(places[0], places[4], over=True)
    places = drawn.chain(7, [x, norm, ("attention", "part"), add, ("x", "name")], first=1, title="parallel")
    drawn.arrow(places[0], places[3], over=True)
    other = drawn.box(3, 7.85, "feedforward", "part")
    drawn.arrow(places[1], other, elbow=True)
    drawn.arrow(other, places[3], elbow=True)
    return drawn.figure


def _attention() -> Figure:
    drawn = _Diagram(7, 4.4)
    x, packed = drawn.box(0, 1.4, "x", "name"), drawn.box(1, 1.4, "qkv", "weights")
    turned = drawn.box(2, 0.4, "q, k: norm,\nrotate")
    scores = drawn.box(3, 0.4, "scale q k\u1d40,\nsoft cap")
    allowed = drawn.box(4, 0.4, "+ bias,\nmask")
    softmax = drawn.box(5, 0.4, "softmax,\ndropout")
    values, mean = drawn.box(2, 2.4, "v"), drawn.box(5, 2.4, "times v")
    out = drawn.box(6, 2.4, "out", "weights")
    end = drawn.box(6, 3.6, "y", "name")
    drawn.arrow(x, packed)
    drawn.arrow(packed, turned, slanted=True)
    drawn.arrow(packed, values, slanted=True)
    for before, after in ((turned, scores), (scores, allowed), (allowed, softmax), (softmax, mean), (values, mean)):
        drawn.arrow(before, after)
    drawn.arrow(mean, out)
    drawn.arrow(out, end)
    return drawn.figure


def _position() -> Figure:
    drawn = _Diagram(6, 3.7)
    tokens, embedding = drawn.box(0, 0.5, "tokens", "name"), drawn.box(1, 0.5, "embedding", "weights")
    drawn.arrow(tokens, embedding)
    places = [drawn.box(2 + number, 0.5, text, "part") for number, text in enumerate(("q, k", "scores", "softmax"))]
    stream = drawn.box(5, 0.5, "...", "name")
    for before, after in zip([embedding, *places], [*places, stream], strict=True):
        drawn.arrow(before, after)
    for column, hook, members in (
        (1, "embed", "learned\nsinusoidal"),
        (2, "rotate", "rotary"),
        (3, "bias", "alibi\nrelative"),
    ):
        named = drawn.box(column, 1.8, hook)
        drawn.arrow(named, _Place(column, 0.5, _HALF_WIDTH, _HALF_HEIGHT))
        drawn.text(column, 2.7, members)
    return drawn.figure


def _embedding() -> Figure:
    drawn = _Diagram(5.4, 3.1)
    y = ("y", "name")
    drawn.chain(0.4, [("tokens", "name"), ("row of\nthe table", "weights"), y], first=1, title="token")
    cut, project = ("cut into\nsquares", "plain"), ("projection", "weights")
    drawn.chain(2, [("image", "name"), cut, project, y], first=1, title="patch")
    return drawn.figure


def _block() -> Figure:
    norm, attention, feedforward = ("norm", "weights"), ("attention", "part"), ("feedforward", "part")
    add, x, y = ("+", "plain"), ("x", "name"), ("y", "name")
    drawn = _Diagram(8, 5.4)
    drawn.text(0, -0.2, "transformer, residual pre", bold=True, left=True)
    places = drawn.chain(0.9, [x, norm, attention, add, norm, feedforward, add, y])
    drawn.arrow(places[0], places[3], over=True)
    drawn.arrow(places[3], places[6], over=True)
    drawn.text(0, 2.1, "reversible", bold=True, left=True)
    upper, lower = 2.8, 4.4
    first, second = drawn.box(0, upper, "a", "name"), drawn.box(0, lower, "b", "name")
    plus = drawn.box(2.5, upper, "+")
    look = drawn.box(1.5, (upper + lower) / 2, "norm,\nattention", "part")
    think = drawn.box(4, (upper + lower) / 2, "norm,\nfeedforward", "part")
    also = drawn.box(5, lower, "+")
    ends = drawn.box(7, upper, "a", "name"), drawn.box(7, lower, "b", "name")
    drawn.arrow(first, plus)
    drawn.arrow(second, look, slanted=True)
    drawn.arrow(look, plus, slanted=True)
    drawn.arrow(second, also)
    drawn.arrow(plus, think, slanted=True)
    drawn.arrow(think, also, slanted=True)
    drawn.arrow(plus, ends[0])
    drawn.arrow(also, ends[1])
    return drawn.figure


def _model() -> Figure:
    tokens, embedding, logits = ("tokens", "name"), ("embedding,\nposition", "part"), ("logits", "name")
    norm, head = ("norm", "part"), ("head", "weights")
    blocks, causal = ("blocks", "part"), ("causal\nblocks", "part")
    drawn = _Diagram(7.4, 9.2)
    drawn.chain(0.4, [tokens, embedding, causal, norm, head, logits], first=1.5, title="decoder")
    drawn.chain(1.8, [tokens, embedding, blocks, ("dense, norm,\nhead", "weights"), logits], first=1.5, title="encoder")
    source = drawn.chain(3.2, [("source", "name"), embedding, blocks, norm], first=1.5, title="encoder_decoder")
    target = drawn.chain(5.4, [("inputs", "name"), embedding, causal, norm, head, logits], first=1.5)
    memory = drawn.box(3.5, 4.3, "memory", "name")
    drawn.arrow(memory, target[2])
    drawn.arrow(source[3], memory, elbow=True)
    images = [("images", "name"), ("patches, class\ntoken, position", "part"), blocks, norm, head, logits]
    drawn.chain(6.8, images, first=1.5, title="vision_transformer")
    stages = [("patches,\nblocks, norm", "part"), ("next\nstages", "part"), ("mean", "plain")]
    drawn.chain(8.2, [("images", "name"), *stages, head, logits], first=1.5, title="hierarchical\n_vision")
    return drawn.figure


def _fused() -> Figure:
    x, y, drop = ("x", "name"), ("y", "name"), ("dropout", "plain")
    bias, residual = ("plus bias", "weights"), ("plus\nresidual", "plain")
    drawn = _Diagram(8, 4.1)
    drawn.chain(0.4, [x, bias, ("activation", "plain"), drop, y], first=2.2, title="bias_activation_dropout")
    drawn.chain(1.7, [x, bias, drop, residual, y], first=2.2, title="bias_dropout_residual")
    normed = [x, bias, drop, residual, ("norm", "weights"), y]
    drawn.chain(3, normed, first=2.2, title="bias_dropout_residual\n_layer_norm")
    return drawn.figure


def _activation() -> Figure:
    figure = Figure(figsize=(7, 4), facecolor=GROUND, layout="constrained")
    z = torch.linspace(-3, 3, 61, dtype=torch.float64)
    grid = figure.subplots(2, 5, sharex=True, sharey=True)
    for axes, name in zip(grid.flat, [*ACTIVATIONS, None], strict=True):
        axes.set_facecolor(GROUND)
        axes.axhline(0, color=LINE, linewidth=0.4)
        axes.axvline(0, color=LINE, linewidth=0.4)
        axes.plot(z, activate(z, name), color="#d1495b" if name else LINE)
        axes.set_title(name or "None", fontsize=9, color=LINE)
        axes.set_xticks([-2, 0, 2])
        axes.set_yticks([0, 2])
        axes.tick_params(labelsize=8, color=LINE, labelcolor=LINE)
        axes.spines[:].set_color(LINE)
        axes.set_ylim(-1, 3)
    return figure


PICTURES: Final[dict[str, Callable[[], Figure]]] = {
    "activation": _activation,
    "attention": _attention,
    "block": _block,
    "embedding": _embedding,
    "feedforward": _feedforward,
    "fused": _fused,
    "model": _model,
    "norm": _norm,
    "position": _position,
    "residual": _residual,
}


def draw(folder: Path, pictures: Mapping[str, Callable[[], Figure]]) -> list[Path]:
    """Draw pictures as SVGs into a folder, and return the files. Used by plots/walks.py too.

    The same version of matplotlib draws the same bytes, since the files hold neither a date nor a random name.
    """
    files = []
    # Text is kept as text, which is small and can be searched; a browser replaces a font that it does not have.
    with rc_context({"svg.hashsalt": "fuselayers", "svg.fonttype": "none", "font.family": "sans-serif"}):
        for name, picture in pictures.items():
            path = folder / f"{name}.svg"
            FigureCanvasSVG(picture()).print_svg(path, metadata={"Date": None, "Creator": None})
            files.append(path)
    return files


if __name__ == "__main__":
    print(*draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, PICTURES), sep="\n")
