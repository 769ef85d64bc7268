"""check -- predicted against measured training steps, and saved bytes, on this CPU."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from rich.console import Console

from ...configs import Config, build
from ...partition.machine import processor_name
from ...partition.saved_bytes import saved_bytes
from ..text import print_table, say
from .layout import Layout
from .measure import example_of, kernel_seconds, measured_rates, shortest, training_step
from .memory import memory_of
from .model import planned_model
from .step_time import update_work
from .trace import EAGER
from .work import seconds_of

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


def checked_models(name: str, config: Config, *, batch: int | None, fused: bool | None = None) -> list[Checked]:
    """Predict and measure steps of a model, with one thread.

    Args:
        name: of the model.
        config: of it.
        batch: examples; None for two and for eight.
        fused: whether the model goes through `fuse`; None as its config says.
    """
    fused = config.fusion.scope != "none" if fused is None else fused
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = planned_model(config, checkpointing=(), low_precision=False, name=name)
        counted = model.counted[model.run_kind if fused else EAGER]
        start = kernel_seconds(fused=fused)
        return [
            _checked(name, config, model, counted, one, fused=fused, start=start)
            for one in ((batch,) if batch else _BATCHES)
        ]
    finally:
        torch.set_num_threads(threads)


def _checked(name: str, config: Config, model: Any, counted: Any, batch: int, *, fused: bool, start: float) -> Checked:
    layers = model.sizes.num_layers
    one = counted.step(batch, num_layers=layers)
    memory = memory_of(model.sizes, counted, Layout(dp=1), batch=batch, low_precision=False, stream_only=False)
    rates = measured_rates(config, batch, fused=fused, kernel=start)
    predicted = seconds_of(one.forward + one.backward + update_work(memory), rates)
    measured = shortest(training_step(config, batch, fused=fused))
    torch.manual_seed(0)
    built = build(config, [] if fused else ["fusion=off"])
    held = saved_bytes(built, *example_of(built, batch))
    return Checked(name, batch, fused, predicted, measured, one.saved_bytes, float(held))


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
