"""Draws the pictures of a folder that `fuselayers bench suite --out FOLDER` wrote, from its results.json alone.

python plots/suite.py plots/cpu/amd_epyc_avx512/suite
"""

import json
import sys
from pathlib import Path
from typing import Any

from fuselayers.cli.bench.measure import Measured
from fuselayers.cli.bench.report import Report, draw_all

__all__ = ["draw_again"]


def draw_again(folder: Path) -> list[Path]:
    """Draw a picture for each dtype; returns the files."""
    content: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    rows = {
        kind: [Measured(**{**row, "shape": tuple(row["shape"])}) for row in content[kind]]
        for kind in ("rows", "models")
    }
    return draw_all(folder, Report(**(content | rows)))


if __name__ == "__main__":
    print(*draw_again(Path(sys.argv[1])), sep="\n")
