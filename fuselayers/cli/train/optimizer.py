"""AdamW with a learning rate that warms up and falls along a cosine."""

import math
from typing import Any

import torch
from torch import nn


def learning_rate(step: int, *, steps: int, warmup_steps: int, peak: float, minimum: float) -> float:
    """The learning rate of a step: a line up to `peak`, then half a cosine down to `minimum`.

    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", 2017, eq. 5, without restarts.

    Args:
        step: 1 for the first, `steps` for the last.
        steps: of the whole run.
        warmup_steps: the last of them has the full rate.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def build_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices only, not for biases and the weights of norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)
