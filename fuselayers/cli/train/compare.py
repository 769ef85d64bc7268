"""Eager against fused, measured on the trained model.

Both models have the same weights, batches and dropout masks, and are timed in one process, in turns.

Legend of the shapes: B sequences, T tokens.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from rich.table import Table
from torch import Tensor, nn

from ...configs import Config, build
from ...partition import saved_bytes
from ...partition.timer import Step, time_in_turns
from ..machine import describe_machine
from ..plain import plain_config
from .checkpoint import random_state, restore_random_state
from .loop import autocast

_WARM_UP = 2


@dataclass(frozen=True)
class Side:
    """The seconds of each forward with backward, and the bytes saved for backward, without the parameters."""

    seconds: tuple[float, ...]
    saved_bytes: int


@dataclass(frozen=True)
class Comparison:
    """Eager against fused.

    Args:
        eager: of plain layers.
        fused: of the trained model.
        tokens: of a step.
        loss_difference: the largest difference between the two losses over `num_batches` batches, nats per byte.
        num_batches: of the loss difference.
        conditions: machine, threads and versions.
    """

    eager: Side
    fused: Side
    tokens: int
    loss_difference: float
    num_batches: int
    conditions: str


def plain_model(config: Config, trained: nn.Module, *, device: torch.device) -> nn.Module:
    """A plain eager model with a copy of the trained weights; torch's generators do not change."""
    states = random_state()
    try:
        model = build(plain_config(config))
    finally:
        restore_random_state(states)
    model.load_state_dict(trained.state_dict())
    return model.to(device).train(trained.training)


def compare(
    eager: nn.Module,
    fused: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    repeats: int = 30,
    precision: str = "float32",
    device: torch.device,
) -> Comparison:
    """Measure both models in training mode; weights, gradients, modes and torch's generators do not change.

    Args:
        eager: the plain model.
        fused: the model with the same weights that was trained.
        batches: tokens and targets, int64 [B, T] on the device, all of the shape that was trained with.
        repeats: how many times each is timed, in turns; the table shows medians.
        precision: of the training: "float32" or "bfloat16".
        device: where both models are.
    """
    states, modes = random_state(), (eager.training, fused.training)
    eager.train()
    fused.train()
    try:
        # The first calls, which compile and warm up, compare the losses.
        differences = []
        for seed, batch in enumerate(batches):
            losses = []
            for model in (eager, fused):
                torch.manual_seed(seed)
                losses.append(_step(model, batch, precision=precision, device=device))
            differences.append(abs(losses[0] - losses[1]))
        saved = []
        for model in (eager, fused):
            torch.manual_seed(0)
            with autocast(device, precision=precision):
                saved.append(saved_bytes(model, *batches[0], parameters=list(model.parameters())))
        steps = {
            name: Step(partial(_step, model, precision=precision, device=device), cycle(batches).__next__)
            for name, model in (("eager", eager), ("fused", fused))
        }
        times = time_in_turns(steps, device=device, rounds=repeats, warm_up=_WARM_UP)
    finally:
        eager.train(modes[0])
        fused.train(modes[1])
        restore_random_state(states)
    return Comparison(
        eager=Side(tuple(times["eager"]), saved[0]),
        fused=Side(tuple(times["fused"]), saved[1]),
        tokens=batches[0][0].numel(),
        loss_difference=max(differences),
        num_batches=len(batches),
        conditions=describe_machine(device),
    )


def comparison_table(comparison: Comparison) -> Table:
    """Speed and saved memory of both."""
    eager, fused = comparison.eager, comparison.fused
    speeds = [comparison.tokens / statistics.median(side.seconds) for side in (eager, fused)]
    table = Table()
    for heading in ("", "eager", "fused", "fused / eager"):
        table.add_column(heading, justify="right" if heading else "left")
    ratio = fused.saved_bytes / eager.saved_bytes
    table.add_row("tokens/s", f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", f"{speeds[1] / speeds[0]:.2f} x")
    megabytes = [f"{side.saved_bytes / 1e6:,.1f}" for side in (eager, fused)]
    table.add_row("saved for backward, MB per step", *megabytes, f"{ratio:.2f} x")
    return table


def comparison_notes(comparison: Comparison) -> list[str]:
    """The difference of the losses, and the conditions of the measurement."""
    return [
        f"losses differ by at most {comparison.loss_difference:.1e} nats per byte on {comparison.num_batches} batches",
        f"forward + backward in training mode, medians of {len(comparison.eager.seconds)} each, in turns",
        comparison.conditions,
    ]


def _step(model: nn.Module, batch: tuple[Tensor, Tensor], *, precision: str, device: torch.device) -> float:
    """Forward and backward as in training; the gradients of the parameters do not change."""
    with autocast(device, precision=precision):
        loss: Tensor = model(*batch)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.item()
