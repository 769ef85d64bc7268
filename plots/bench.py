"""Draws what `fuselayers bench ... --json FILE` measured: FILE.png beside each FILE.json, from nothing but that file.

fuselayers bench op bias_activation_dropout --dropout 0.1 --shape 8x256x1024 --json plots/cpu/NAME.json
python plots/bench.py plots/cpu/*.json
"""

import json
import statistics
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["draw", "main"]

_PASSES = {"forward": "forward", "forward_backward": "forward + backward"}


def draw(path: Path) -> Path:
    """Draw one measurement: a bar per candidate and pass, with whiskers from the first to the third quartile.

    Args:
        path: a file that `fuselayers bench --json` wrote.

    Returns:
        The picture's path.

    Raises:
        ValueError: the file is something else, or holds fewer than two times of a candidate.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or not {"subject", "machine", "date", "seconds"} <= content.keys():
        raise ValueError(
            f"{path} was not written by `fuselayers bench --json`: it lacks subject, machine, date or seconds"
        )
    candidates = list(content["seconds"])
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for place, (key, label) in enumerate(_PASSES.items()):
        medians, below, above = [], [], []
        for name in candidates:
            times = [seconds * 1e3 for seconds in content["seconds"][name][key]]
            if len(times) < 2:
                raise ValueError(f"{path} holds {len(times)} times of {name}; measure with --repeats 2 or more")
            first, median, third = statistics.quantiles(times, n=4)
            medians.append(median)
            below.append(median - first)
            above.append(third - median)
        positions = [number + (place - 0.5) * 0.38 for number in range(len(candidates))]
        bars = axes.bar(positions, medians, 0.36, yerr=(below, above), capsize=3, label=label)
        axes.bar_label(bars, [f"{medians[0] / median:.2f} x" for median in medians], padding=3, fontsize=8)
    axes.set_xticks(range(len(candidates)), candidates)
    axes.set_ylabel("milliseconds, median and quartiles")
    axes.set_title(textwrap.fill(content["subject"], 100), fontsize=9)
    measured = f"{content['machine']}, {content['date']}"
    axes.set_xlabel(f"{measured}\nabove each bar: how many times as fast as {candidates[0]}", fontsize=8)
    axes.margins(y=0.12)
    axes.legend()
    picture = path.with_suffix(".png")
    FigureCanvasAgg(figure).print_png(picture)
    return picture


def main(arguments: Sequence[str]) -> int:
    """Draw every file named; without one, say how to call it."""
    if not arguments:
        print("usage: python plots/bench.py FILE.json ...", file=sys.stderr)
        return 2
    for argument in arguments:
        try:
            print(draw(Path(argument)))
        except (OSError, ValueError) as error:
            print(f"plots/bench.py: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
