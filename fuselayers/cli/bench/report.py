"""The output of `bench`: one table for all subjects, and the suite's folder."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from ..files import write_text
from .measure import Measured

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


@dataclass
class Report:
    """All measurements: rows of ops, and of whole models.

    Attributes:
        machine: the machine and the versions, as text.
        bandwidth: of a copy, in bytes per second, read and written.
        failed: wrong numbers or errors, by candidate.
    """

    machine: str
    date: str
    repeats: int
    bandwidth: float
    rows: list[Measured] = field(default_factory=list)
    models: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


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


def write_folder(folder: Path, report: Report) -> list[Path]:
    """Write results.json and results.md; return the files."""
    files = [folder / "results.json", folder / "results.md"]
    write_text(files[0], json.dumps(asdict(report)) + "\n")
    write_text(files[1], _markdown(report))
    return files


def _markdown(report: Report) -> str:
    conditions = f"{report.machine}, {report.date}, medians of {report.repeats} in turns."
    lines = ["# Ops and models against eager PyTorch", "", conditions, *(f"\n{note}." for note in NOTES)]
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
    if report.failed:
        lines += ["", "## Not timed: wrong numbers, or an error", ""]
        lines += [f"- {what}: {why}" for what, why in report.failed.items()]
    return "\n".join(lines) + "\n"
