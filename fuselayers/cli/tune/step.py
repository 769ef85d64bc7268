"""How long a training step of a model takes on each backend that works here."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ...configs import build, compose
from ...partition import backends
from ...partition.timer import Step, median_seconds, time_in_turns
from ..example import example_batch

_ROUNDS: Final = 31


def step_seconds(overrides: Sequence[str], *, batch_size: int | None, device: torch.device) -> dict[str, float]:
    """Return the median seconds of a forward and backward, for each override that chooses a backend, or none.

    The steps take turns, so that other load falls on each; all models are in memory at once.

    Args:
        overrides: of the config.
        batch_size: examples at once; None is the config's `train.batch_size`.
        device: where the model is.

    Raises:
        ValueError: an override that does not fit, a model in which nothing is fused, or one that does not say what it
            is called with.
    """
    config = compose("gpt_nano", overrides)
    if config.fusion.scope == "none":
        raise ValueError("nothing in this model is fused, so there is nothing to choose; take fusion=auto")
    fusions = {"fusion=off": replace(config.fusion, scope="none")} | {
        f"fusion.backend={status.name}": replace(config.fusion, backend=status.name)
        for status in backends(device=device)
        if status.available and status.name != "auto"
    }
    plain = build(replace(config, fusion=fusions["fusion=off"]))
    inputs = example_batch(plain, config, (batch_size or config.train.batch_size,), device=device)
    steps = {}
    for override, fusion in fusions.items():
        model = build(replace(config, fusion=fusion)).to(device).train()
        steps[override] = Step(partial(_step, model, inputs))
    # The warm-up compiles.
    return median_seconds(time_in_turns(steps, device=device, rounds=_ROUNDS, warm_up=3))


def _step(model: Any, inputs: Sequence[Tensor], _: object) -> None:
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    reached = [tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.requires_grad]
    weights = [torch.ones_like(tensor) for tensor in reached]
    torch.autograd.grad(reached, tuple(model.parameters()), weights, allow_unused=True)
