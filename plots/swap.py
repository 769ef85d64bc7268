"""Measures the sites that `swap` finds in each family of transformers, saved bytes, and the time of a training step.

PYTHONPATH=. python plots/swap.py FOLDER              # writes FOLDER/swap.json, for the table of docs/swap.md
PYTHONPATH=. python plots/swap.py FOLDER gpt2 bert    # measures these again

The models are those of the tests, eight times as wide: two layers, 256 wide, 2 x 96 tokens, so that Python does not
dominate a step's time. Swin begins 96 wide, as Swin-T, on 192 x 192 pixels.
"""

import copy
import functools
import inspect
import json
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import fuselayers
from fuselayers.cli.machine import measured_machine
from fuselayers.cli.timer import Step, median_seconds, time_in_turns
from fuselayers.partition import saved_bytes
from tests.components.swap.models import FAMILIES, batch_for, loss_of

__all__ = ["main", "measured"]

NAMES: Final = (
    *("gpt2", "bert", "llama", "mistral", "qwen3", "gemma2", "opt"),
    *("phi", "stablelm", "vit", "deit", "swin", "t5", "whisper"),
)
LEVELS: Final[dict[str, dict[str, Any]]] = {"layers": {"level": "layers"}, "blocks": {"level": "blocks"}, "default": {}}
SCALE: Final = 8
SCALE_OF_SWIN: Final = 6
ROUNDS: Final = 21


def measured(name: str) -> dict[str, Any]:
    """Sites, bytes, time and error of one family, by level."""
    torch.manual_seed(0)
    scale = SCALE_OF_SWIN if name == "swin" else SCALE
    plain, batch = FAMILIES[name][0](scale).train(), batch_for(name, scale=scale)
    models: dict[str, nn.Module] = {"plain": plain}
    levels: dict[str, Any] = {}
    bytes_before = saved_bytes(plain, **batch)
    for level, options in LEVELS.items():
        model = models[level] = copy.deepcopy(plain)
        report = fuselayers.swap(model, **options, batch=batch)
        levels[level] = {
            "level": report.level,
            "sites": Counter(site.rule for site in report.sites),
            "skipped": Counter(skipped.reason for skipped in report.skipped),
            "saved": saved_bytes(model, **batch) / bytes_before,
            "error": _error(plain, model, batch),
        }
    torch.compiler.reset()  # else Dynamo would count the blocks' graphs towards the limit of the plain model's
    steps = {level: Step(functools.partial(_step, model, batch)) for level, model in models.items()}
    steps["torch.compile"] = Step(functools.partial(_step, torch.compile(copy.deepcopy(plain)), batch))
    seconds = median_seconds(time_in_turns(steps, device=torch.device("cpu"), rounds=ROUNDS, warm_up=3))
    for level, row in levels.items():
        row["time"] = seconds[level] / seconds["plain"]
    compiled = seconds["torch.compile"] / seconds["plain"]
    return {"saved_bytes": bytes_before, "seconds": seconds["plain"], "compiled": compiled, "levels": levels}


def _step(model: Any, batch: dict[str, torch.Tensor], _: None) -> None:
    loss_of(model, batch).backward()


def _error(plain: nn.Module, swapped: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """The relative difference of the losses: in training mode if nothing is dropped, else in evaluation mode."""
    drops = len({loss_of(plain, batch).item() for _ in range(9)}) > 1  # Swin drops whole layers for a few samples
    if drops and "use_cache" in inspect.signature(plain.forward).parameters:
        batch = {**batch, "use_cache": False}  # type: ignore[dict-item]  # with a cache a block runs its own forward
    losses = [loss_of(model.train(not drops), batch).item() for model in (plain, swapped)]
    plain.train(), swapped.train()
    return abs(losses[1] / losses[0] - 1)


def main(folder: Path, *names: str) -> None:
    """Measure families; each is written when it is done."""
    import transformers

    torch.set_num_threads(1)
    machine = f"{measured_machine(torch.device('cpu'))}, transformers {transformers.__version__}"
    file = folder / "swap.json"
    families = json.loads(file.read_text(encoding="utf-8"))["families"] if names else {}
    for name in names or NAMES:
        families[name] = measured(name)
        print(name, json.dumps(families[name]), flush=True)
        content = {"machine": machine, "date": date.today().isoformat(), "families": families}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
