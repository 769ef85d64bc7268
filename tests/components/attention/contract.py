"""Attentions, their inputs, and the comparison with a written-out reference."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselayers.components import MultiHeadAttention, RotaryPosition
from tests.components.call import Call
from tests.components.compare import assert_same_values, randomise, run

HIDDEN_DIM, HEADS, TOKENS = 12, 6, 7
# The arguments of forward that `inputs_of` makes.
INPUTS = ("rotate", "distance_bias", "key_padding_mask", "mask", "documents")


def made(**options: Any) -> MultiHeadAttention:
    layer = randomise(MultiHeadAttention(HIDDEN_DIM, **{"num_heads": HEADS, "causal": True, **options}))
    return layer.double()  # type: ignore[return-value]


def small(layer: Any) -> Any:
    """Give every parameter normal values: no zeros or ones, and scores of the size that training makes."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.4)
    return layer


def padding(keys: int) -> Tensor:
    """[4, S]: nothing padded, the end padded, the beginning and the middle padded, everything padded."""
    place = torch.arange(keys)
    inner = (place >= min(2, keys - 1)) & (place != 4)
    return torch.stack((place >= 0, place < max(1, keys - 2), inner, place < 0))


def inputs_of(names: Sequence[str], tokens: int = TOKENS, keys: int = TOKENS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    made: dict[str, Any] = {
        "rotate": RotaryPosition().rotate,
        "distance_bias": torch.randn(HEADS, tokens + keys - 1, generator=generator, dtype=torch.float64),
        "key_padding_mask": padding(keys),
        "mask": torch.rand(4, 1, tokens, keys, generator=generator) < 0.7,
        "documents": torch.randint(3, (4, keys), generator=generator),
    }
    return {name: made[name] for name in names}


def assert_is(
    layer: Any,
    reference: Callable[..., Tensor],
    names: Sequence[str] = (),
    *,
    tokens: int = TOKENS,
    memory: int = 0,
    kernels: Sequence[str] = (),
) -> None:
    """Fail unless values and gradients are those of the reference, in float64.

    Args:
        layer: an attention.
        reference: its reference.
        names: the inputs, of `INPUTS`.
        tokens: the number of tokens.
        memory: the number of tokens of the memory; 0 for none.
        kernels: of multi-head attention; by default only the layer's own.
    """
    exact = copy.deepcopy(layer).double()
    inputs = inputs_of(names, tokens, memory or tokens)
    leaves = {"distance_bias": inputs.pop("distance_bias")} if "distance_bias" in inputs else {}
    if memory:
        leaves["memory"] = torch.randn(4, memory, HIDDEN_DIM, dtype=torch.float64)
    tensors = [torch.randn(4, tokens, HIDDEN_DIM, dtype=torch.float64), *leaves.values()]
    expected = run(Call(exact, reference, inputs, [*leaves]), tensors)
    tolerance = 1e-5 if "rotate" in names else 1e-9  # the angles of rotary are float32
    for kernel in kernels or ("",):
        if kernel:
            exact.kernel = kernel
        got = run(Call(exact, type(layer).forward, inputs, [*leaves]), tensors)
        assert_same_values(expected, got, rtol=tolerance, atol=tolerance)
