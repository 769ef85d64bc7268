"""Linear layers, torch's and those of transformers, whose weight may be transposed: the faster product on a CPU."""

from typing import Any, Final

import torch
from torch import Tensor, nn

from .... import ops
from ....ops.linear import onednn_wins
from ...plain import is_parameter
from ..layer import own_forward
from ..parts import is_linear
from ..rule import Rule

_LEAST_WEIGHT: Final = 1 << 14  # elements; a smaller layer needs more than 1,024 rows to gain


def weight_of(layer: Any) -> Tensor:
    """Return the weight as [N, K]."""
    weight: Tensor = layer.weight
    # Conv1D has [K, N]; FalconLinear is an nn.Linear.
    return weight if isinstance(layer, nn.Linear) else weight.T


def linear(x: Tensor, layer: Any) -> Tensor:
    """Return layer(x) without calling the layer."""
    return ops.linear(x, weight_of(layer), layer.bias)


def _forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
    if len(args) != 1 or kwargs:  # torch names the argument `input`, `Conv1D` names it `x`
        result: Tensor = own_forward(self, *args, **kwargs)
        return result
    return linear(args[0], self)


def _is_faster(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose products are faster in `ops.linear` for many inputs."""
    if not onednn_wins() or not is_linear(module):
        return False
    weight = weight_of(module)
    return weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= _LEAST_WEIGHT


RULES: Final[tuple[Rule, ...]] = (
    Rule("linear", of=nn.Module, forward=_forward, parts={"weight": is_parameter}, fits=_is_faster),
)
