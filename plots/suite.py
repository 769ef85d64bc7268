"""Draws the pictures of a folder that `fuselayers bench suite --out FOLDER` wrote, from its results.json alone.

python plots/suite.py plots/cpu/amd_epyc_avx512/suite
"""

import json
import sys
from dataclasses import fields
from pathlib import Path

from fuselayers.cli.bench.suite import Measured
from fuselayers.cli.bench.suite_report import draw_all

__all__ = ["draw_again"]


def draw_again(folder: Path) -> list[Path]:
    """Draw a picture for each dtype and span; returns the files."""
    content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    known = {field.name for field in fields(Measured)}  # older files have more
    rows = [
        Measured(**{name: value for name, value in row.items() if name in known} | {"shape": tuple(row["shape"])})
        for row in content["rows"]
    ]
    return draw_all(folder, rows, machine=content["machine"], date=content["date"], repeats=content["repeats"])


if __name__ == "__main__":
    print(*draw_again(Path(sys.argv[1])), sep="\n")
