"""Run several trainings in the same processes, so that a test starts them once: runs.py FOLDER.

FOLDER/runs.json maps a name to overrides and an event. In overrides {rank} stands for the rank of the process. The
event happens on rank 1 before its third step: "signal" is a SIGTERM, "weight" is a NaN in its part of a weight, null is
no event. FOLDER/name.json then holds the exit code, the output, the text of a refusal, and the kinds of the parameters
and of the fused parts.
"""

import io
import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.tensor import DTensor

from fuselayers.cli.train import train
from fuselayers.cli.train.engine import Processes, joined_processes
from fuselayers.cli.train.loop import Trainer, Update
from fuselayers.partition import FusedModule

_step = Trainer.step


def _run(overrides: list[str], event: str | None, group: Processes) -> dict[str, Any]:
    trained: dict[str, Any] = {}

    def step(trainer: Trainer, number: int) -> Update:
        if (group.rank, number, event) == (1, 3, "signal"):
            signal.raise_signal(signal.SIGTERM)
        if (group.rank, number, event) == (1, 3, "weight"):
            weight = trainer.engine.module.get_submodule("blocks.1.feedforward.down").weight
            with torch.no_grad():
                (weight.to_local() if isinstance(weight, DTensor) else weight).fill_(math.nan)
        parameters = list(trainer.engine.module.parameters())
        fused = [part for part in trainer.engine.module.modules() if isinstance(part, FusedModule)]
        trained["wrapper"] = type(trainer.engine.model).__name__
        trained["placements"] = sorted({str(getattr(weight, "placements", "whole")) for weight in parameters})
        trained["fused"] = sorted({graph.served_by for part in fused for graph in part.report().graphs})
        return _step(trainer, number)

    Trainer.step = step  # type: ignore[method-assign]
    output, refused, code = io.StringIO(), "", -1
    try:
        code = train(overrides, console=Console(file=output, width=200), processes=group)
    except (ValueError, OSError) as error:
        refused = str(error)
    return {"code": code, "output": output.getvalue(), "refused": refused, **trained}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with joined_processes() as group:
        for name, (overrides, event) in json.loads((root / "runs.json").read_text()).items():
            # Each rank may have its own text, like machines whose files differ.
            result = _run([text.replace("{rank}", str(group.rank)) for text in overrides], event, group)
            for key in ("code", "refused"):
                assert len(set(group.gathered(result[key]))) == 1, (name, key, group.gathered(result[key]))
            if group.is_main:
                (root / f"{name}.json").write_text(json.dumps(result))
