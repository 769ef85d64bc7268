"""The files of the suite: results.json, results.md, and a picture for each dtype and span."""

import json
import math
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from ...errors import MissingPackageError
from ...figure import new_figure
from ..files import write_text, write_whole
from ..text import complain
from .measure import EAGER, OURS
from .suite import Measured, Suite
from .suite_models import models_table

_SPANS: Final = {"forward": "forward", "forward_backward": "forward + backward"}
_COLOURS: Final = ("#d1495b", "#2e86ab", "#c98a00", "#4f9d69")
_MEGABYTE: Final = 1e6


def write_data(folder: Path, suite: Suite, *, machine: str, date: str, repeats: int) -> list[Path]:
    """Write results.json and results.md into `folder`, which must exist; returns the files."""
    said = f"{machine}, {date}, medians of {repeats} in turns"
    content = {"machine": machine, "date": date, "repeats": repeats, **asdict(suite)}
    files = [folder / "results.json", folder / "results.md"]
    write_text(files[0], json.dumps(content) + "\n")
    write_text(files[1], table(suite, said=said))
    return files


def write_report(folder: Path, suite: Suite, *, machine: str, date: str, repeats: int) -> list[Path]:
    """Write the data, and the pictures where matplotlib is installed; returns the files."""
    files = write_data(folder, suite, machine=machine, date=date, repeats=repeats)
    try:
        return files + draw_all(folder, suite.rows, machine=machine, date=date, repeats=repeats)
    except MissingPackageError as error:
        complain(f"no pictures: {error}")
        return files


def draw_all(folder: Path, rows: Sequence[Measured], *, machine: str, date: str, repeats: int) -> list[Path]:
    """Draw a picture for each dtype and span into `folder`; returns the files."""
    files = []
    said = f"{machine}, {date}, medians of {repeats} in turns"
    for dtype in dict.fromkeys(row.dtype for row in rows):
        for span, title in _SPANS.items():
            files.append(folder / f"results_{span}_{dtype}.svg")
            draw(
                files[-1], [row for row in rows if row.dtype == dtype], span=span, title=f"{title}, {dtype}", said=said
            )
    return files


def table(suite: Suite, *, said: str) -> str:
    """The results as Markdown: for every op, shape and dtype the times of eager, and the ratios of the others.

    Args:
        suite: the measurements.
        said: the machine, the date and the method.
    """
    lines = [
        "# Ops against eager PyTorch",
        "",
        f"{said}. Eager in milliseconds, the others as ratios: 2.00 is "
        "twice as fast. f: forward, fb: forward and backward. Peak: bytes beside the inputs, as a share of eager's. "
        "Kept: megabytes saved for backward. Bandwidth: the bytes that must move, per second, as a share of the rate "
        f"of a copy here ({suite.bandwidth / 1e9:,.0f} GB/s).",
    ]
    candidates = list(dict.fromkeys(row.candidate for row in suite.rows if row.candidate != EAGER))
    for dtype in dict.fromkeys(row.dtype for row in suite.rows):
        headings = ["op", "shape", "eager f", "eager fb"]
        headings += [f"{name} {short}" for name in candidates for short in ("f", "fb")]
        headings += [f"{OURS} peak", "eager kept", f"{OURS} kept", "bandwidth f", "bandwidth fb"]
        lines += [
            "",
            f"## {dtype}",
            "",
            f"| {' | '.join(headings)} |",
            "| --- | --- |" + " ---: |" * (len(headings) - 2),
        ]
        lines += [
            f"| {' | '.join(_cells(rows, candidates, bandwidth=suite.bandwidth))} |"
            for rows in _by_place(suite.rows, dtype)
        ]
    if suite.models:
        lines += ["", *models_table(suite.models)]
    for heading, items in (
        ("Not timed: wrong numbers, or an error", [f"{what}: {why}" for what, why in suite.failed.items()]),
        ("Left out, there was no time", suite.left_out),
    ):
        if items:
            lines += ["", f"## {heading}", "", *(f"- {item}" for item in items)]
    return "\n".join(lines) + "\n"


def _by_place(rows: Sequence[Measured], dtype: str) -> Iterator[dict[str, Measured]]:
    """The candidates of each variant and shape, by name."""
    places: dict[tuple[str, tuple[int, ...]], dict[str, Measured]] = {}
    for row in rows:
        if row.dtype == dtype:
            places.setdefault((row.title, row.shape), {})[row.candidate] = row
    yield from (place for place in places.values() if EAGER in place)


def _cells(rows: dict[str, Measured], candidates: Sequence[str], *, bandwidth: float) -> Iterator[str]:
    eager, ours = rows[EAGER], rows.get(OURS)
    yield eager.title
    yield "x".join(map(str, eager.shape))
    for span in _SPANS:
        yield f"{eager.median(span) * 1e3:.3f}"
    for name in candidates:
        for span in _SPANS:
            yield f"{eager.median(span) / rows[name].median(span):.2f}" if name in rows else ""
    yield f"{ours.peak / eager.peak:.2f}" if ours is not None and ours.peak is not None and eager.peak else ""
    yield f"{eager.kept / _MEGABYTE:.2f}"
    yield f"{ours.kept / _MEGABYTE:.2f}" if ours is not None else ""
    for span in _SPANS:
        known = ours is not None and span in ours.floor
        yield f"{ours.floor[span] / ours.median(span) / bandwidth:.0%}" if known and ours is not None else ""


def draw(path: Path, rows: Sequence[Measured], *, span: str, title: str, said: str) -> None:
    """Draw the speed of each candidate relative to eager: a group of bars for each op, the fastest of ours on top.

    A bar is the geometric mean over the op's shapes.

    Args:
        path: of the SVG.
        rows: of one dtype.
        span: "forward" or "forward_backward".
        title: above the bars.
        said: below them.
    """
    eager = {(row.title, row.shape): row.median(span) for row in rows if row.candidate == EAGER}
    logarithms: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.candidate != EAGER and (row.title, row.shape) in eager:
            ratio = eager[row.title, row.shape] / row.median(span)
            logarithms.setdefault(row.title, {}).setdefault(row.candidate, []).append(math.log(ratio))
    means = {
        op: {name: math.exp(statistics.fmean(found)) for name, found in of_op.items()}
        for op, of_op in logarithms.items()
    }
    ops = sorted(means, key=lambda op: means[op].get(OURS, 0.0))
    names = sorted({name for of_op in means.values() for name in of_op}, key=lambda name: (name != OURS, name))
    # Readable in a light and a dark page: no ground, and a grey that contrasts with both.
    grey = "#808080"
    figure = new_figure(figsize=(4.5, 0.43 * len(ops) + 1.2), facecolor="none")
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fuselayers", "text.color": grey, "xtick.color": grey}):
        axes = figure.add_subplot(facecolor="none")
        height = 0.55 / max(1, len(names))
        for place, name in enumerate(names):
            known = [(number, means[op][name]) for number, op in enumerate(ops) if name in means[op]]
            middles = [number - height * (place + 0.5) for number, _ in known]
            colour = _COLOURS[place % len(_COLOURS)]
            bars = axes.barh(middles, [ratio for _, ratio in known], 0.9 * height, color=colour, label=name)
            axes.bar_label(bars, fmt=" {:.2f}", fontsize=8)
        for number, op in enumerate(ops):
            axes.text(0, number + 0.04, f" {op}", fontsize=10, va="bottom")
        axes.axvline(1, color=grey, linewidth=1, linestyle="--", alpha=0.6, label="eager")
        axes.set_ylim(-0.8, len(ops) - 0.4)
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.margins(x=0.12)
        axes.set_title(f"{title}: times as fast as eager PyTorch", fontsize=9)
        axes.legend(loc="lower right", fontsize=10, frameon=False)
        figure.supxlabel(textwrap.fill(said, 66), fontsize=7)
        write_whole(path, lambda file: figure.savefig(file, format="svg", metadata={"Date": None}))
