"""The contract of every attention other than multi_head. Used by their tests.

A reference gets (layer, x_BTD, rotate, real_BT), and a memory if there is one. It is written out in full matrices or
plain loops, and calls none of the layer's functions.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fuselayers.components import RotaryPosition
from fuselayers.components.attention.inputs import takes
from tests.components.compare import assert_same_step

HIDDEN_DIM = 12
# The memory has 9 tokens; x has fewer or more, so that either side can be the longer.
MEMORY = 9
MEMORY_CASES = [(1, True), (7, False), (12, True)]
# Options of the attentions that have heads.
HEADS = {"all heads": {"num_heads": 6}, "grouped": {"num_heads": 6, "num_kv_heads": 2, "bias": False}}

Reference = Callable[..., Tensor]


def padding(tokens: int) -> Tensor:
    """[4, T]: nothing padded, the end padded, the beginning and the middle padded, everything padded."""
    place = torch.arange(tokens)
    inner = (place >= min(2, tokens - 1)) & (place != 4)
    return torch.stack((place >= 0, place < max(1, tokens - 2), inner, place < 0))


def heads_of(layer: Any, x_BTD: Tensor, rotate: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [B, H, T, C] with as many key heads as query heads."""
    heads, groups, channels = layer.num_heads, layer.num_kv_heads, layer.head_dim
    packed = x_BTD @ layer.qkv.weight.T + (0 if layer.qkv.bias is None else layer.qkv.bias)
    columns = [packed[..., i * channels : (i + 1) * channels] for i in range(heads + 2 * groups)]
    q = torch.stack(columns[:heads], 1)
    k = torch.stack(columns[heads : heads + groups], 1)
    v = torch.stack(columns[heads + groups :], 1)
    if rotate is not None:
        q, k = rotate(q, k)
    of_query = [h * groups // heads for h in range(heads)]
    return q, k[:, of_query], v[:, of_query]


def joined(layer: Any, mixed_BHTC: Tensor) -> Tensor:
    mixed = torch.cat(mixed_BHTC.unbind(1), -1)
    return mixed @ layer.out.weight.T + (0 if layer.out.bias is None else layer.out.bias)


def allowed(tokens: int, real_BT: Tensor | None, *, causal: bool, window: int | None = None) -> Tensor:
    """Return which keys each query may look at: bool [B, 1, T, T]."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    pairs = (distance.abs() < (tokens if window is None else window)) & (distance >= (0 if causal else -tokens))
    real_BT = torch.ones(1, tokens, dtype=torch.bool) if real_BT is None else real_BT
    return pairs & real_BT[:, None, None]


def small(layer: Any) -> Any:
    """Give every parameter normal values: no zeros or ones, and scores of the size that training makes."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.4)
    return layer


def assert_is(
    layer: nn.Module,
    reference: Reference,
    *,
    tokens: int,
    memory: int = 0,
    rotated: bool = False,
    padded: bool = False,
    tolerance: float = 1e-8,
) -> None:
    """Fail unless values and gradients are those of the reference, in float64. `memory` is a number of tokens."""
    exact = copy.deepcopy(layer).double()
    rotate = RotaryPosition().rotate if rotated else None
    real_BT = padding(memory or tokens) if padded else None
    inputs = {"rotate": rotate, "key_padding_mask": real_BT}
    arguments = {name: value for name, value in inputs.items() if name in takes(layer.forward)}

    class Forward(nn.Module):
        def __init__(self, written_out: bool) -> None:
            super().__init__()
            self.layer, self.written_out = exact, written_out

        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            looked_at = {} if memory is None else {"memory": memory}
            if self.written_out:
                return reference(self.layer, x, rotate, real_BT, **looked_at)
            return self.layer(x, **arguments, **looked_at)

    tensors = [torch.randn(4, size, HIDDEN_DIM, dtype=torch.float64) for size in (tokens, memory) if size]
    tolerance = 1e-5 if rotated else tolerance  # the angles of rotary are float32
    assert_same_step(Forward(True), Forward(False), *tensors, rtol=tolerance, atol=tolerance)
