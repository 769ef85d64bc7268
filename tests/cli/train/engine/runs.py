"""Several trainings by the same processes, so that a test starts torchrun once: torchrun ... runs.py FOLDER.

FOLDER/runs.json maps a name to overrides, and to the rank and the step that get a SIGTERM, if any. FOLDER/name.json
then holds the exit code, what the run printed, and the text of a refusal, which is the same on every process.
"""

import io
import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from fuselayers.cli.train import train
from fuselayers.cli.train.engine import Processes, joined_processes
from fuselayers.cli.train.loop import Trainer, Update
from fuselayers.partition import warm_up

_step = Trainer.step


def _stopped_at(rank: int, at: int) -> Any:
    def step(trainer: Trainer, number: int) -> Update:
        if trainer.engine.processes.rank == rank and number == at:
            signal.raise_signal(signal.SIGTERM)
        return _step(trainer, number)

    return step


def _run(name: str, overrides: list[str], stop: list[int] | None, folder: Path, group: Processes) -> None:
    output, refused, code = io.StringIO(), "", None
    Trainer.step = _step if stop is None else _stopped_at(*stop)  # type: ignore[method-assign]
    try:
        code = train(overrides, console=Console(file=output, width=200), processes=group)
    except ValueError as error:
        refused = str(error)
    code_of_all = group.largest(-1 if code is None else code)
    if group.is_main:
        result = {"code": code_of_all, "output": output.getvalue(), "refused": refused}
        (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with warm_up(math.inf), joined_processes() as group:
        for name, (overrides, stop) in json.loads((root / "runs.json").read_text()).items():
            _run(name, overrides, stop, root, group)
