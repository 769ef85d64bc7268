"""Plain PyTorch, this library's eager layers and the fused model, measured on the trained weights.

The three are timed in one process, in turns, on the same batches. The eager and the fused model have the same dropout
masks.

Legend of the shapes: B sequences, T tokens.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Final

import torch
from torch import Tensor, nn

from ...configs import Config, build
from ...partition import saved_bytes
from ...partition.timer import Step, time_in_turns
from ..machine import describe_machine
from ..plain import plain_config
from ..plain_torch import plain_twin
from .loop import autocast

PLAIN: Final = "plain PyTorch"
EAGER: Final = "eager layers"
FUSED: Final = "fused"
_WARM_UP = 2


@dataclass(frozen=True)
class Side:
    """The seconds of each forward with backward, and the bytes saved for backward, without the parameters."""

    seconds: tuple[float, ...]
    saved_bytes: int


@dataclass(frozen=True)
class Comparison:
    """The models by name, the baseline first.

    Args:
        sides: PLAIN where the model has a twin in plain PyTorch, EAGER and FUSED.
        tokens: of a step.
        loss_difference: the largest difference between the losses of EAGER and FUSED over `num_batches` batches, in
            training, nats per byte.
        plain_difference: the same of PLAIN and EAGER without dropout, since torch's draws other masks; None without
            PLAIN.
        num_batches: of the differences.
        conditions: machine, threads and versions.
        compile_seconds: what compiling FUSED took; None where it is not known.
    """

    sides: dict[str, Side]
    tokens: int
    loss_difference: float
    plain_difference: float | None
    num_batches: int
    conditions: str
    compile_seconds: float | None = None


def unfused_models(
    config: Config, trained: nn.Module, *, weights: Mapping[str, Tensor], device: torch.device
) -> dict[str, nn.Module]:
    """EAGER, and PLAIN before it if there is a twin, with the trained weights; torch's generators do not change.

    Args:
        config: of the run.
        trained: the model, in the mode that these get.
        weights: its state_dict, with whole tensors where the model is split.
        device: for the models.
    """
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        eager = build(plain_config(config))
    eager.load_state_dict(weights)
    eager.to(device).train(trained.training)
    try:
        return {PLAIN: plain_twin(eager), EAGER: eager}
    except ValueError:
        return {EAGER: eager}


def compare(
    models: Mapping[str, nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    repeats: int = 30,
    precision: str = "float32",
    device: torch.device,
    compile_seconds: float | None = None,
) -> Comparison:
    """Measure the models in training mode; weights, gradients, modes and torch's generators do not change.

    Args:
        models: of `unfused_models`, and FUSED, the model that was trained.
        batches: tokens and targets, int64 [B, T] on the device, all of the shape that was trained with.
        repeats: how many times each is timed, in turns; the table shows medians.
        precision: of the training: "float32" or "bfloat16".
        device: where the models are.
        compile_seconds: what compiling FUSED took before, if known.
    """
    modes = {name: model.training for name, model in models.items()}
    run = partial(_step, precision=precision, device=device)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            plain_differences = []
            if PLAIN in models:
                for name in (PLAIN, EAGER):
                    models[name].eval()
                plain_differences = [abs(run(models[PLAIN], batch) - run(models[EAGER], batch)) for batch in batches]
            for model in models.values():
                model.train()
            # The first calls, which compile and warm up, compare the losses.
            differences = []
            for seed, batch in enumerate(batches):
                losses = []
                for name in (EAGER, FUSED):
                    torch.manual_seed(seed)
                    losses.append(run(models[name], batch))
                differences.append(abs(losses[0] - losses[1]))
            saved = {}
            for name, model in models.items():
                with autocast(device, precision=precision):
                    saved[name] = saved_bytes(model, *batches[0], parameters=list(model.parameters()))
            steps = {name: Step(partial(run, model), cycle(batches).__next__) for name, model in models.items()}
            times = time_in_turns(steps, device=device, rounds=repeats, warm_up=_WARM_UP)
        finally:
            for name, model in models.items():
                model.train(modes[name])
    return Comparison(
        sides={name: Side(tuple(times[name]), saved[name]) for name in models},
        tokens=batches[0][0].numel(),
        loss_difference=max(differences),
        plain_difference=max(plain_differences) if plain_differences else None,
        num_batches=len(batches),
        conditions=describe_machine(device),
        compile_seconds=compile_seconds,
    )


def comparison_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Speed and saved memory of each model, both relative to the first, and what compiling costs: a table's rows."""
    sides = comparison.sides
    seconds = {name: statistics.median(side.seconds) for name, side in sides.items()}
    speeds = [comparison.tokens / median for median in seconds.values()]
    saved = [side.saved_bytes for side in sides.values()]
    rows = [
        ("tokens/s", [f"{speed:,.0f}" for speed in speeds]),
        ("", [f"{speed / speeds[0]:.2f} x" for speed in speeds]),
        ("saved for backward, MB per step", [f"{size / 1e6:,.1f}" for size in saved]),
        ("", [f"{size / saved[0]:.2f} x" for size in saved]),
    ]
    if comparison.compile_seconds is not None:
        compiling = comparison.compile_seconds
        gains = {name: median - seconds[FUSED] for name, median in seconds.items()}
        rows += [
            ("compiling, seconds", [f"{compiling:.1f}" if name == FUSED else "" for name in sides]),
            (
                "steps until fusion has earned that back",
                [
                    "" if name == FUSED else f"{compiling / gain:,.0f}" if gain > 0 else "never"
                    for name, gain in gains.items()
                ],
            ),
        ]
    return [{"": label, **dict(zip(sides, cells, strict=True))} for label, cells in rows]


def comparison_notes(comparison: Comparison) -> list[str]:
    """The differences of the losses, and the conditions of the measurement."""
    batches = f"on {comparison.num_batches} batches"
    notes = [
        f"losses of {EAGER} and {FUSED}, with the same dropout masks, differ by at most "
        f"{comparison.loss_difference:.1e} nats per byte {batches}"
    ]
    if comparison.plain_difference is not None:
        notes.append(
            f"{PLAIN} draws other masks; without dropout its losses differ by at most {comparison.plain_difference:.1e}"
        )
    readings = len(next(iter(comparison.sides.values())).seconds)
    return [
        *notes,
        f"forward + backward in training mode, medians of {readings} each, in turns",
        comparison.conditions,
    ]


def _step(model: nn.Module, batch: tuple[Tensor, Tensor], *, precision: str, device: torch.device) -> float:
    """Forward and backward as in training; the gradients of the parameters do not change."""
    with autocast(device, precision=precision):
        loss: Tensor = model(*batch)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.item()
