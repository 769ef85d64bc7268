"""The output of `bench`: one table for all subjects, and the suite's folder with a picture for each dtype."""

import json
import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from ...errors import MissingPackageError
from ...figure import new_figure
from ..files import write_text, write_whole
from ..text import complain
from .measure import PLAIN, Measured
from .subjects import OURS

NOTES: Final = (
    "f: forward; fb: forward and backward, +- half the distance of the quartiles; x: times as fast as plain",
    "plain: eager PyTorch without this library; torch.compile: the same, compiled; fuselayers: the op as it is called; "
    "eager: a model's own layers, not fused; others: fused by that backend",
    "kept: saved for backward, without inputs and weights; peak: without inputs; bandwidth: of the bytes that must "
    "move, as a share of a copy's rate",
)
FIRST_STEP: Final = "first step, cold / warm"
FIRST_STEP_NOTE: Final = (
    f"{FIRST_STEP}: forward and backward in a new process, with an empty compile cache and with a filled one; "
    "fused as the config says"
)
_SPANS: Final = {"f": "forward", "fb": "forward_backward"}
_COLOURS: Final = ("#d1495b", "#2e86ab", "#c98a00", "#4f9d69")


@dataclass
class Report:
    """All measurements: rows of ops, and of whole models.

    Attributes:
        machine: the machine and the versions, as text.
        bandwidth: of a copy, in bytes per second, read and written.
        failed: wrong numbers or errors, by candidate.
        left_out: titles of measurements for which there was no time.
    """

    machine: str
    date: str
    repeats: int
    bandwidth: float
    rows: list[Measured] = field(default_factory=list)
    models: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        """The conditions of the measurement, in one line."""
        return f"{self.machine}, {self.date}, medians of {self.repeats} in turns"


def table(rows: Sequence[Measured], *, bandwidth: float = math.nan) -> list[dict[str, str]]:
    """Return a line for each candidate, with its times and bytes; a subject's first candidate is the baseline.

    Args:
        bandwidth: of a copy; only rows with a floor need it.
    """
    plain: dict[tuple[object, ...], Measured] = {}
    lines = []
    for row in rows:
        base = plain.setdefault((row.title, row.shape, row.dtype), row)
        line = {"": row.candidate}
        for short, span in _SPANS.items():
            line[f"{short} ms"] = f"{row.median(span) * 1e3:.3f}"
            line[f"{short} x"] = f"{base.median(span) / row.median(span):.2f} x"
        line["+-"] = f"{_spread(row.seconds['forward_backward']):.0%}"
        line["kept MB"] = f"{row.kept / 1e6:.2f}"
        if row.peak is not None:
            line["peak MB"] = f"{row.peak / 1e6:.2f}"
        for short, span in _SPANS.items() if row.floor else ():
            line[f"bandwidth {short}"] = f"{row.floor[span] / row.median(span) / bandwidth:.0%}"
        if any(other.first_step for other in rows):
            line[FIRST_STEP] = "{:.1f} / {:.1f} s".format(*row.first_step) if row.first_step else "-"
        lines.append(line)
    return lines


def _spread(seconds: Sequence[float]) -> float:
    """Half the distance between the quartiles, over the median: 0.05 is "give or take 5 %"."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / 2 / middle


def write_folder(folder: Path, report: Report, *, pictures: bool) -> list[Path]:
    """Write results.json, results.md, and pictures if asked and matplotlib is installed; return the files."""
    files = [folder / "results.json", folder / "results.md"]
    write_text(files[0], json.dumps(asdict(report)) + "\n")
    write_text(files[1], _markdown(report))
    try:
        return files + (draw_all(folder, report) if pictures else [])
    except MissingPackageError as error:
        complain(f"no pictures: {error}")
        return files


def _markdown(report: Report) -> str:
    lines = ["# Ops and models against eager PyTorch", "", f"{report.said}.", *(f"\n{note}." for note in NOTES)]
    for heading, rows in (("Ops", report.rows), ("Whole models", report.models)):
        if not rows:
            continue
        cells = table(rows, bandwidth=report.bandwidth)
        columns = list(dict.fromkeys(column for line in cells for column in line))
        lines += ["", f"## {heading}", "", f"| subject | {' | '.join(columns)} |"]
        lines.append(f"| --- | --- |{' ---: |' * (len(columns) - 1)}")
        for row, line in zip(rows, cells, strict=True):
            subject = f"{row.title}, {row.dtype}, {'x'.join(map(str, row.shape))}"
            lines.append(f"| {subject} | {' | '.join(line.get(column, '') for column in columns)} |")
    failed = [f"{what}: {why}" for what, why in report.failed.items()]
    for heading, items in (("Not timed: wrong numbers, or an error", failed), ("Left out, no time", report.left_out)):
        if items:
            lines += ["", f"## {heading}", "", *(f"- {item}" for item in items)]
    return "\n".join(lines) + "\n"


def draw_all(folder: Path, report: Report) -> list[Path]:
    """Draw forward and backward of the ops, a picture for each dtype, into `folder`; return the files."""
    files = []
    for dtype in dict.fromkeys(row.dtype for row in report.rows):
        files.append(folder / f"results_forward_backward_{dtype}.svg")
        title = f"forward + backward, {dtype}: times as fast as eager PyTorch"
        speeds = _mean_speeds([row for row in report.rows if row.dtype == dtype])
        _draw(files[-1], speeds, title=title, said=report.said)
    return files


def _mean_speeds(rows: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """The speed of each candidate relative to plain, by op and name: geometric means over the op's shapes."""
    span = "forward_backward"
    plain = {(row.title, row.shape): row.median(span) for row in rows if row.candidate == PLAIN}
    logarithms: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.candidate != PLAIN and (row.title, row.shape) in plain:
            of_op = logarithms.setdefault(row.title, {}).setdefault(row.candidate, [])
            of_op.append(math.log(plain[row.title, row.shape] / row.median(span)))
    return {
        op: {name: math.exp(statistics.fmean(values)) for name, values in of_op.items()}
        for op, of_op in logarithms.items()
    }


def _draw(path: Path, speeds: dict[str, dict[str, float]], *, title: str, said: str) -> None:
    """Draw a group of bars for each op, the fastest of ours on top."""
    ops = sorted(speeds, key=lambda op: speeds[op].get(OURS, 0.0))
    names = sorted({name for of_op in speeds.values() for name in of_op}, key=lambda name: (name != OURS, name))
    # Readable on a light and on a dark page: no background, and a grey that contrasts with both.
    grey = "#808080"
    figure = new_figure(figsize=(4.5, 0.43 * len(ops) + 1.2), facecolor="none")
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fuselayers", "text.color": grey, "xtick.color": grey}):
        axes = figure.add_subplot(facecolor="none")
        height = 0.55 / max(1, len(names))
        for place, name in enumerate(names):
            bars_of = [(number, speeds[op][name]) for number, op in enumerate(ops) if name in speeds[op]]
            middles = [number - height * (place + 0.5) for number, _ in bars_of]
            colour = _COLOURS[place % len(_COLOURS)]
            bars = axes.barh(middles, [speed for _, speed in bars_of], 0.9 * height, color=colour, label=name)
            axes.bar_label(bars, fmt=" {:.2f}", fontsize=8)
        for number, op in enumerate(ops):
            axes.text(0, number + 0.04, f" {op}", fontsize=10, va="bottom")
        axes.axvline(1, color=grey, linewidth=1, linestyle="--", alpha=0.6, label="eager")
        axes.set_ylim(-0.8, len(ops) - 0.4)
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.margins(x=0.12)
        axes.set_title(title, fontsize=9)
        axes.legend(loc="lower right", fontsize=10, frameon=False)
        figure.supxlabel(textwrap.fill(said, 66), fontsize=7)
        write_whole(path, lambda file: figure.savefig(file, format="svg", metadata={"Date": None}))
