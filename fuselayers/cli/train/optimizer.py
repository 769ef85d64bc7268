"""AdamW with a learning rate that warms up and falls along a cosine."""

import math
from typing import Any

import torch
from torch import nn

from ...configs import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of a step, 1 for the first: a line up to `learning_rate`, half a cosine down to `min_learning_rate`.

    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", 2017, eq. 5, without restarts.
    """
    peak, minimum = config.learning_rate, config.min_learning_rate
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices only, not for biases and the weights of norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)
