"""Plain PyTorch, this library's eager layers and the fused model, measured on the trained weights.

`bench` times the three, in one process and in turns. The eager and the fused model have the same dropout masks.

Legend of the shapes: B sequences, T tokens.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from ...components.model.plain_torch import plain_twin
from ...configs import Config, build
from ..bench.measure import PLAIN, Candidate, Measured, Subject, measure
from ..machine import describe_machine
from ..plain import plain_config
from .loop import autocast

EAGER: Final = "eager layers"
FUSED: Final = "fused"
COMPRESSED: Final = "fused, int8"


@dataclass(frozen=True)
class Comparison:
    """The measured models, the baseline first.

    Attributes:
        rows: the measurements of the models.
        loss_difference: the largest difference between the losses of EAGER and FUSED, nats per byte.
        plain_difference: the same for PLAIN and EAGER, without dropout; None without PLAIN.
        conditions: machine, threads and versions.
        compile_seconds: the time of compiling, if known.
    """

    rows: list[Measured]
    loss_difference: float
    plain_difference: float | None
    num_batches: int
    conditions: str
    compile_seconds: float | None


def eager_model(config: Config, *, weights: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """The model of a config in this library's eager layers, with the trained weights."""
    model = build(plain_config(config))
    model.load_state_dict(weights)
    return model.to(device)


def compared_models(
    config: Config, trained: nn.Module, eager: nn.Module, *, weights: Mapping[str, Tensor], device: torch.device
) -> dict[str, nn.Module]:
    """PLAIN if the model has a twin, EAGER, FUSED, and COMPRESSED if the run is fused with exact saved values."""
    models = {EAGER: eager, FUSED: trained}
    with suppress(ValueError):
        models = {PLAIN: plain_twin(eager), **models}
    if config.fusion.scope != "none" and config.fusion.compress is None:
        compressed = build(replace(config, fusion=replace(config.fusion, compress="int8")))
        compressed.load_state_dict(weights)
        models[COMPRESSED] = compressed.to(device)
    return models


def compare(
    models: Mapping[str, nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    repeats: int = 30,
    precision: str = "float32",
    device: torch.device,
    compile_seconds: float | None = None,
) -> Comparison:
    """Measure the models in training mode. They stay in that mode; weights and gradients do not change.

    Args:
        models: of `compared_models`.
        batches: tokens and targets, int64 [B, T] on the device, all of the training shape.
        repeats: how many times each is timed, in turns; the table shows medians.
        precision: of the training: "float32" or "bfloat16".
        compile_seconds: the time of compiling, if known.
    """

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor]:
        with autocast(device, precision=precision):
            return (model(*batch),)

    def losses(name: str) -> list[float]:
        torch.manual_seed(0)
        return [loss(models[name], batch)[0].item() for batch in batches]

    def difference(first: str, second: str) -> float:
        return max(abs(left - right) for left, right in zip(losses(first), losses(second), strict=True))

    plain_difference = None
    if PLAIN in models:
        for name in (PLAIN, EAGER):
            models[name].eval()
        with torch.no_grad():
            plain_difference = difference(PLAIN, EAGER)
    candidates = []
    for name, model in models.items():
        model.train()
        leaves = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
        candidates.append(Candidate(name, partial(loss, model, batches[0]), leaves))
    loss_difference = difference(EAGER, FUSED)
    subject = Subject("the trained model", tuple(batches[0][0].shape), precision, candidates, {})
    rows = measure(subject, repeats=repeats, device=device)
    conditions = describe_machine(device)
    return Comparison(rows, loss_difference, plain_difference, len(batches), conditions, compile_seconds)


def comparison_notes(comparison: Comparison) -> list[str]:
    """Return notes below the table: the difference of the losses, the cost of compiling, and the conditions."""
    notes = [
        f"losses of {EAGER} and {FUSED}, with the same dropout masks, differ by at most "
        f"{comparison.loss_difference:.1e} nats per byte on {comparison.num_batches} batches"
    ]
    if comparison.plain_difference is not None:
        notes.append(
            f"{PLAIN} PyTorch draws other masks; without dropout its losses differ by at most "
            f"{comparison.plain_difference:.1e}"
        )
    if comparison.compile_seconds is not None:
        seconds = {row.candidate: row.median("forward_backward") for row in comparison.rows}
        gain = next(iter(seconds.values())) - seconds[FUSED]
        steps = f"after {comparison.compile_seconds / gain:,.0f} steps" if gain > 0 else "never"
        notes.append(f"compiling took {comparison.compile_seconds:.1f} s, earned back {steps}")
    readings = len(comparison.rows[0].seconds["forward"])
    return [
        *notes,
        f"f: forward; fb: forward and backward, in training mode, medians of {readings} in turns; kept: for backward",
        comparison.conditions,
    ]
