"""Plain PyTorch, this library's eager layers and the fused model, measured on the trained weights.

`bench` times the three, in one process and in turns. The eager and the fused model have the same dropout masks.

Legend of the shapes: B sequences, T tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from ...configs import Config, build
from ..bench.measure import PLAIN, Candidate, Measured, Subject, measure
from ..machine import describe_machine
from ..plain import plain_config
from ..plain_torch import plain_twin
from .loop import autocast

EAGER: Final = "eager layers"
FUSED: Final = "fused"
COMPRESSED: Final = "fused, int8"


@dataclass(frozen=True)
class Comparison:
    """The measured models, the baseline first: PLAIN where the model has a twin in plain PyTorch, EAGER, FUSED, and
    COMPRESSED if the fusion core fuses it.

    Attributes:
        rows: of the models.
        loss_difference: the largest difference between the losses of EAGER and FUSED, in training, nats per byte.
        plain_difference: the same of PLAIN and EAGER without dropout, since torch's draws other masks; None without
            PLAIN.
        conditions: machine, threads and versions.
    """

    rows: list[Measured]
    loss_difference: float
    plain_difference: float | None
    num_batches: int
    conditions: str


def unfused_models(
    config: Config, trained: nn.Module, *, weights: Mapping[str, Tensor], device: torch.device
) -> dict[str, nn.Module]:
    """EAGER, and PLAIN before it if there is a twin, with the trained weights; torch's generators do not change.

    Args:
        trained: the model, in the mode that these get.
        weights: its state_dict, with whole tensors where the model is split.
    """
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        eager = build(plain_config(config))
    eager.load_state_dict(weights)
    eager.to(device).train(trained.training)
    try:
        return {PLAIN: plain_twin(eager), EAGER: eager}
    except ValueError:
        return {EAGER: eager}


def compressed_models(
    config: Config, trained: nn.Module, *, weights: Mapping[str, Tensor], device: torch.device
) -> dict[str, nn.Module]:
    """COMPRESSED, the fused model with its saved values in int8, for a run in which they are exact; else nothing.

    The arguments are those of `unfused_models`.
    """
    if config.fusion.scope == "none" or config.fusion.compress is not None:
        return {}
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        model = build(replace(config, fusion=replace(config.fusion, compress="int8")))
    model.load_state_dict(weights)
    return {COMPRESSED: model.to(device).train(trained.training)}


def compare(
    models: Mapping[str, nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    repeats: int = 30,
    precision: str = "float32",
    device: torch.device,
) -> Comparison:
    """Measure the models in training mode; weights, gradients, modes and torch's generators do not change.

    Args:
        models: of `unfused_models`, FUSED, the model that was trained, and of `compressed_models`.
        batches: tokens and targets, int64 [B, T] on the device, all of the shape that was trained with.
        repeats: how many times each is timed, in turns; the table shows medians.
        precision: of the training: "float32" or "bfloat16".
    """

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor]:
        with autocast(device, precision=precision):
            return (model(*batch),)

    def difference(first: str, second: str) -> float:
        """The largest difference of two models' losses, with the same random numbers."""
        differences = []
        for seed, batch in enumerate(batches):
            losses = []
            for name in (first, second):
                torch.manual_seed(seed)
                losses.append(loss(models[name], batch)[0].item())
            differences.append(abs(losses[0] - losses[1]))
        return max(differences)

    candidates = []
    for name, model in models.items():
        leaves = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
        candidates.append(Candidate(name, partial(loss, model, batches[0]), leaves))
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        with _mode(models, training=False):
            plain_difference = difference(PLAIN, EAGER) if PLAIN in models else None
        with _mode(models, training=True):
            loss_difference = difference(EAGER, FUSED)
            subject = Subject("the trained model", tuple(batches[0][0].shape), precision, candidates, {})
            rows = measure(subject, repeats=repeats, device=device)
    return Comparison(rows, loss_difference, plain_difference, len(batches), describe_machine(device))


@contextmanager
def _mode(models: Mapping[str, nn.Module], *, training: bool) -> Iterator[None]:
    before = {name: model.training for name, model in models.items()}
    for model in models.values():
        model.train(training)
    try:
        yield
    finally:
        for name, model in models.items():
            model.train(before[name])


def comparison_notes(comparison: Comparison, *, compile_seconds: float | None = None) -> list[str]:
    """Return notes below the table: the differences of the losses, the cost of compiling, and the conditions."""
    notes = [
        f"losses of {EAGER} and {FUSED}, with the same dropout masks, differ by at most "
        f"{comparison.loss_difference:.1e} nats per byte on {comparison.num_batches} batches"
    ]
    if comparison.plain_difference is not None:
        notes.append(
            f"{PLAIN} PyTorch draws other masks; without dropout its losses differ by at most "
            f"{comparison.plain_difference:.1e}"
        )
    if compile_seconds is not None:
        seconds = {row.candidate: row.median("forward_backward") for row in comparison.rows}
        gain = next(iter(seconds.values())) - seconds[FUSED]
        earned = f"earned back after {compile_seconds / gain:,.0f} steps" if gain > 0 else "never earned back"
        notes.append(f"compiling took {compile_seconds:.1f} s, {earned}")
    readings = len(comparison.rows[0].seconds["forward"])
    return [
        *notes,
        f"f: forward; fb: forward and backward, in training mode, medians of {readings} in turns; kept: for backward",
        comparison.conditions,
    ]
