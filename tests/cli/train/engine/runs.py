"""Several trainings by the same processes, so that a test starts torchrun once: torchrun ... runs.py FOLDER.

FOLDER/runs.json maps a name to overrides. Rank 0 writes what each run prints to FOLDER/name.txt, an error's text
included, and each run its files to FOLDER/name. A refusal must be the same on every process.
"""

import json
import math
import sys
from pathlib import Path

from rich.console import Console

from fuselayers.cli.train import train
from fuselayers.cli.train.engine import Processes, processes
from fuselayers.partition import warm_up


def _run(name: str, overrides: list[str], folder: Path, group: Processes) -> None:
    with open(folder / f"{name}.txt" if group.is_main else "/dev/null", "w") as file:
        console = Console(file=file, width=200)
        try:
            train([*overrides, f"train.output={folder / name}"], console=console, processes=group)
        except ValueError as error:
            print(f"refused: {error}", file=file)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with warm_up(math.inf), processes() as group:
        for name, overrides in json.loads((root / "runs.json").read_text()).items():
            _run(name, overrides, root, group)
