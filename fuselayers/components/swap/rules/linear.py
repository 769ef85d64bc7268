"""Linear layers of either kind: torch's, and those of transformers with a transposed weight."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def weight_of(layer: Any) -> Tensor:
    """[N, K]"""
    weight: Tensor = layer.weight
    # Conv1D has [K, N]; FalconLinear is an nn.Linear.
    return weight if isinstance(layer, nn.Linear) else weight.T


def linear(x: Tensor, layer: Any) -> Tensor:
    """layer(x), without its call."""
    return F.linear(x, weight_of(layer), layer.bias)
