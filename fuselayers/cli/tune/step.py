"""How long a training step of a model takes on each backend that works here."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from ...configs import build, compose
from ...partition import backends
from ..example import example_batch

_SECONDS: Final = 2.0


def step_seconds(overrides: Sequence[str], *, batch_size: int | None, device: torch.device) -> dict[str, float]:
    """Return the median seconds of a forward and backward, for each override that chooses a backend, or none.

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
    seconds = {}
    for override, fusion in fusions.items():
        torch.compiler.reset()
        model = build(replace(config, fusion=fusion)).to(device).train()
        timer = Timer(
            "step(model, inputs)",
            globals={"step": _step, "model": model, "inputs": inputs},
            num_threads=torch.get_num_threads(),
        )
        timer.timeit(2)  # compiles
        seconds[override] = timer.blocked_autorange(min_run_time=_SECONDS).median
    return seconds


def _step(model: Any, inputs: Sequence[Tensor]) -> None:
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    reached = [tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.requires_grad]
    weights = [torch.ones_like(tensor) for tensor in reached]
    torch.autograd.grad(reached, tuple(model.parameters()), weights, allow_unused=True)
