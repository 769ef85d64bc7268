"""check -- predicted against measured training steps, and saved bytes, on this CPU."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import torch
from rich.console import Console

from ...configs import Config, build
from ...partition.machine import processor_name
from ...partition.saved_bytes import saved_bytes
from ..text import print_table, say
from .layout import Layout
from .measure import example_of, is_fused, shortest, this_machine, training_step
from .model import PlannedModel, planned_model
from .search import plan_of

_BATCHES: Final = (2, 8)


@dataclass(frozen=True)
class Checked:
    """A training step, predicted and measured.

    Attributes:
        model: its name.
        batch: examples.
        fused: whether the model goes through `fuse`; if not, it runs op by op.
        predicted_seconds: of a step.
        measured_seconds: the shortest of several, CPU time of one thread.
        predicted_saved: bytes saved for backward.
        measured_saved: the same, counted by autograd's hooks.
    """

    model: str
    batch: int
    fused: bool
    predicted_seconds: float
    measured_seconds: float
    predicted_saved: float
    measured_saved: float


def checked_models(name: str, config: Config, *, batch: int | None) -> list[Checked]:
    """Predict and measure steps of a model, with one thread.

    Args:
        name: of the model.
        config: of it.
        batch: examples; None for two and for eight.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = planned_model(config, checkpointing=(), precision="float32", name=name)
        return [_checked(model, config, one) for one in ((batch,) if batch else _BATCHES)]
    finally:
        torch.set_num_threads(threads)


def _checked(model: PlannedModel, config: Config, batch: int) -> Checked:
    plan = plan_of(model, this_machine(config, batch), Layout(), gpus=1, batch=batch)
    measured = shortest(training_step(config, batch))
    torch.manual_seed(0)
    built = build(config)
    return Checked(
        model=model.name,
        batch=batch,
        fused=is_fused(config),
        predicted_seconds=plan.time.total,
        measured_seconds=measured,
        predicted_saved=plan.memory.saved,
        measured_saved=float(saved_bytes(built, *example_of(built, batch))),
    )


def print_check(console: Console, rows: Sequence[Checked], *, as_json: bool) -> None:
    """Print a line for each, or JSON."""
    machine = f"{processor_name()}, one thread, torch {torch.__version__}"
    if as_json:
        say(console, json.dumps({"machine": machine, "steps": [asdict(row) for row in rows]}, indent=1))
        return
    table = [
        {
            "model": row.model,
            "batch": row.batch,
            "mode": "fuse" if row.fused else "eager",
            "predicted": f"{row.predicted_seconds * 1e3:.1f} ms",
            "measured": f"{row.measured_seconds * 1e3:.1f} ms",
            "ratio": f"{row.predicted_seconds / row.measured_seconds:.2f}",
            "saved": f"{row.predicted_saved / row.measured_saved:.3f} x",
        }
        for row in rows
    ]
    print_table(console, table, title=machine)
