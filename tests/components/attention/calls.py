"""Small attentions and their inputs, computed by the layer and by the written-out reference.

Used by the tests of options and of flex.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fuselayers.components import MultiHeadAttention, RotaryPosition
from tests.components.attention.reference import reference
from tests.components.compare import assert_same_values, randomise, run

HIDDEN_DIM, HEADS, TOKENS, MEMORY = 12, 6, 7, 5
# The arguments of forward that `inputs_of` makes.
INPUTS = ("rotate", "bias", "key_padding_mask", "mask")


def made(**options: Any) -> MultiHeadAttention:
    layer = randomise(MultiHeadAttention(HIDDEN_DIM, **{"num_heads": HEADS, "causal": True, **options}))
    return layer.double()  # type: ignore[return-value]


def padding(keys: int) -> Tensor:
    """[2, S]: the end padded; the beginning padded, so that a causal token there sees nothing."""
    place = torch.arange(keys)
    return torch.stack((place < keys - 2, place >= 2))


def inputs_of(names: tuple[str, ...], keys: int = TOKENS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    made: dict[str, Any] = {
        "rotate": RotaryPosition().rotate,
        "bias": torch.randn(HEADS, TOKENS, keys, generator=generator, dtype=torch.float64),
        "key_padding_mask": padding(keys),
        "mask": torch.rand(2, 1, TOKENS, keys, generator=generator) < 0.7,
    }
    return {name: made[name] for name in names}


class Call(nn.Module):
    """Calls a layer or its reference. `inputs` need no gradient; `names` are the leaves, which do."""

    def __init__(self, layer: MultiHeadAttention, inputs: dict[str, Any], *, written_out: bool, names: tuple[str, ...]):
        super().__init__()
        self.layer, self.inputs, self.names = layer, inputs, names
        self.call: Callable[..., Tensor] = reference if written_out else MultiHeadAttention.forward

    def forward(self, x_BTD: Tensor, *leaves: Tensor) -> Tensor:
        arguments = {**self.inputs, **dict(zip(self.names, leaves, strict=True))}
        return self.call(self.layer, x_BTD, **arguments)


def assert_as_written_out(
    layer: MultiHeadAttention, names: tuple[str, ...], *, kernels: tuple[str, ...] = (), memory: bool = False
) -> None:
    """Fail unless each kernel, by default the layer's own, gives the values and gradients of the reference."""
    keys = MEMORY if memory else TOKENS
    inputs = inputs_of(names, keys)
    leaves = {"bias": inputs.pop("bias")} if "bias" in inputs else {}
    if memory:
        leaves["memory"] = torch.randn(2, MEMORY, HIDDEN_DIM, dtype=torch.float64)
    tensors = [torch.randn(2, TOKENS, HIDDEN_DIM, dtype=torch.float64), *leaves.values()]
    expected = run(Call(layer, inputs, written_out=True, names=tuple(leaves)), tensors)
    tolerance = 1e-5 if "rotate" in names else 1e-9  # the angles of rotary are float32
    for kernel in kernels or (layer.kernel,):
        layer.kernel = kernel
        got = run(Call(layer, inputs, written_out=False, names=tuple(leaves)), tensors)
        assert_same_values(expected, got, rtol=tolerance, atol=tolerance)
