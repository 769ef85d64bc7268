"""The picture of a run: loss over steps."""

from collections.abc import Sequence
from pathlib import Path

from ...figure import new_figure
from ..files import write_whole
from .metrics import Metrics

FILE_NAME = "loss.png"


def plot_loss(path: Path, rows: Sequence[Metrics], *, title: str) -> None:
    """Draw the training and the validation loss as a PNG.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figure = new_figure(figsize=(8, 4.5))
    axes = figure.add_subplot()
    steps = [row.step for row in rows]
    axes.plot(steps, [row.loss for row in rows], color="tab:blue", alpha=0.6, linewidth=0.8, label="training")
    measured = [(row.step, row.validation_loss) for row in rows if row.validation_loss is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), color="tab:orange", marker="o", markersize=4, label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    write_whole(path, lambda file: figure.savefig(file, format="png"))
