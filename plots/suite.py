"""Draws a folder that `fuselayers bench suite --out FOLDER` wrote, from its results.json alone.

python -m plots.suite plots/cpu/amd_epyc_avx512/suite
"""

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib import rc_context

from fuselayers.figure import new_figure

__all__ = ["draw"]

_GREY = "#808080"  # readable on a light and on a dark page
_COLOURS = {"fuselayers": "#d1495b", "torch.compile": "#2e86ab"}


def draw(folder: Path) -> list[Path]:
    """Draw forward and backward of the ops, a picture for each dtype, into `folder`; returns the files."""
    content: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    files = []
    for dtype in dict.fromkeys(row["dtype"] for row in content["rows"]):
        files.append(folder / f"results_forward_backward_{dtype}.svg")
        speeds = _mean_speeds(row for row in content["rows"] if row["dtype"] == dtype)
        said = f"{content['machine']}, {content['date']}, medians of {content['repeats']} in turns"
        _draw(files[-1], speeds, title=f"forward + backward, {dtype}: times as fast as eager PyTorch", said=said)
    return files


def _mean_speeds(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The speed of each candidate relative to plain, by op and name: geometric means over the op's shapes."""
    plain: dict[str, float] = {}
    speeds: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        seconds = statistics.median(row["seconds"]["forward_backward"])
        subject = f"{row['title']} {row['shape']}"
        if row["candidate"] == "plain":
            plain[subject] = seconds
        elif subject in plain:
            of_op = speeds.setdefault(row["title"], {})
            of_op.setdefault(row["candidate"], []).append(plain[subject] / seconds)
    return {
        op: {name: statistics.geometric_mean(values) for name, values in of_op.items()} for op, of_op in speeds.items()
    }


def _draw(path: Path, speeds: dict[str, dict[str, float]], *, title: str, said: str) -> None:
    """Draw a group of bars for each op, the fastest of ours on top."""
    ops = sorted(speeds, key=lambda op: speeds[op].get("fuselayers", 0.0))
    figure = new_figure(figsize=(4.5, 0.43 * len(ops) + 1.2), facecolor="none")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fuselayers", "text.color": _GREY, "xtick.color": _GREY}):
        axes = figure.add_subplot(facecolor="none")
        height = 0.55 / len(_COLOURS)
        for index, (name, colour) in enumerate(_COLOURS.items()):
            measured = {number: speeds[op][name] for number, op in enumerate(ops) if name in speeds[op]}
            middles, lengths = [number - height * (index + 0.5) for number in measured], list(measured.values())
            bars = axes.barh(middles, lengths, 0.9 * height, color=colour, label=name)
            axes.bar_label(bars, fmt=" {:.2f}", fontsize=8)
        for number, op in enumerate(ops):
            axes.text(0, number + 0.04, f" {op}", fontsize=10, va="bottom")
        axes.axvline(1, color=_GREY, linewidth=1, linestyle="--", alpha=0.6, label="eager")
        axes.set_ylim(-0.8, len(ops) - 0.4)
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.margins(x=0.12)
        axes.set_title(title, fontsize=9)
        axes.legend(loc="lower right", fontsize=10, frameon=False)
        figure.supxlabel(said, fontsize=7, wrap=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    print(*draw(Path(sys.argv[1])), sep="\n")
