"""How long a training step of a model takes on each backend that works here."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from ...configs import build, compose
from ...partition import backends
from ..bench.measure import time_interleaved
from ..bench.subjects import model_candidate
from ..example import example_batch

_ROUNDS: Final = 31


def step_seconds(overrides: Sequence[str], *, device: torch.device) -> dict[str, float]:
    """Return the median seconds of a forward and backward, by the override that chooses a backend or turns fusion off.

    A step takes `train.batch_size` examples. The steps take turns, so that other load affects all of them. All models
    are in memory at once.

    Raises:
        ValueError: an override is invalid, nothing in the model is fused, or the model has no `example_inputs`.
    """
    config = compose("gpt_nano", overrides)
    if config.fusion.scope == "none":
        raise ValueError("nothing in this model is fused, so there is nothing to choose; set fusion=auto")
    fusions = {"fusion=off": replace(config.fusion, scope="none")} | {
        f"fusion.backend={status.name}": replace(config.fusion, backend=status.name)
        for status in backends(device=device)
        if status.available and status.name != "auto"
    }
    plain = build(replace(config, fusion=fusions["fusion=off"]))
    inputs = example_batch(plain, config, (config.train.batch_size,), device=device)
    candidates = []
    for override, fusion in fusions.items():
        model = build(replace(config, fusion=fusion)).to(device).train()
        candidates.append(model_candidate(inputs, override, model))
    # The warm-up compiles.
    times = time_interleaved(candidates, repeats=_ROUNDS, device=device)
    return {override: statistics.median(seconds["forward_backward"]) for override, seconds in times.items()}
