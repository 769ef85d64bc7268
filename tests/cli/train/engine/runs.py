"""Several trainings by the same processes, so that a test starts torchrun once: torchrun ... runs.py FOLDER.

FOLDER/runs.json maps a name to overrides, in which {rank} is the process's own, and to what happens to a rank before a
step, if anything: see `_happens`. FOLDER/name.json then holds the exit code, what the run printed, the text of a
refusal, which is the same on every process, and what is fused.
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
from torch import nn
from torch.distributed.tensor import DTensor

from fuselayers.cli.train import train
from fuselayers.cli.train.engine import Processes, joined_processes
from fuselayers.cli.train.loop import Trainer, Update
from fuselayers.partition import FusedModule

_step = Trainer.step
_trained: list[nn.Module] = []


def _watched(trainer: Trainer, number: int) -> Update:
    _trained[:] = [trainer.engine.module]
    return _step(trainer, number)


def _happens(rank: int, at: int, what: str, layer: str = "") -> Any:
    """A rank gets a SIGTERM ("signal"), or what it has of a layer goes wrong ("output", "weight", "gradient")."""

    def step(trainer: Trainer, number: int) -> Update:
        if trainer.engine.processes.rank == rank and number == at:
            if what == "signal":
                signal.raise_signal(signal.SIGTERM)
            elif what == "output":
                module = trainer.engine.module.get_submodule(layer)
                module.register_forward_hook(lambda module, args, output: output * math.nan)
            elif what == "gradient":
                module = trainer.engine.module.get_submodule(layer)
                # The square of the gradient is above float32's 3.4e38.
                module.register_full_backward_hook(lambda module, before, after: (before[0] * 1e23,))
            else:
                weight = trainer.engine.module.get_submodule(layer).weight
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                with torch.no_grad():
                    local.fill_(math.nan)
        return _watched(trainer, number)

    return step


def _fused() -> dict[str, Any]:
    """How many fused modules the last model has, and what serves their graphs."""
    reports = [part.report() for model in _trained for part in model.modules() if isinstance(part, FusedModule)]
    return {
        "modules": len(reports),
        "served_by": sorted({one.served_by for report in reports for one in report.graphs}),
    }


def _run(name: str, overrides: list[str], event: list[Any] | None, folder: Path, group: Processes) -> None:
    output, refused, code = io.StringIO(), "", None
    _trained.clear()
    Trainer.step = _watched if event is None else _happens(*event)  # type: ignore[method-assign]
    # What each machine has under one name may differ.
    overrides = [text.replace("{rank}", str(group.rank)) for text in overrides]
    try:
        code = train(overrides, console=Console(file=output, width=200), processes=group)
    except ValueError as error:
        refused = str(error)
    assert group.from_main(refused) == refused, refused
    code_of_all = group.largest(-1 if code is None else code)
    if group.is_main:
        result = {"code": code_of_all, "output": output.getvalue(), "refused": refused, "fused": _fused()}
        (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with joined_processes() as group:
        for name, (overrides, event) in json.loads((root / "runs.json").read_text()).items():
            _run(name, overrides, event, root, group)
