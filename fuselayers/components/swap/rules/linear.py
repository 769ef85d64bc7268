"""Linear layers: torch's, and those of transformers, whose weight may be transposed."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def weight_of(layer: Any) -> Tensor:
    """Return the weight as [N, K]."""
    weight: Tensor = layer.weight
    # Conv1D has [K, N]; FalconLinear is an nn.Linear.
    return weight if isinstance(layer, nn.Linear) else weight.T


def linear(x: Tensor, layer: Any) -> Tensor:
    """Return layer(x) without calling the layer."""
    return F.linear(x, weight_of(layer), layer.bias)
