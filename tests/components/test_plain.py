"""Layers whose call is bypassed while it is plain: their weights go into an op of the layer around them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fuselayers.components import (
    FusedBiasDropoutResidualLayerNorm,
    FusedMLP,
    LayerNorm,
    MixtureOfExperts,
    MultiHeadAttention,
    RMSNorm,
)

D = 8


def into_mlp(mlp: Any, x: Tensor) -> Tensor:
    return mlp(x)


def into_add(norm: Any, x: Tensor) -> Tensor:
    return norm.add(x, x, style="post")


def into_layer(layer: Any, x: Tensor) -> Tensor:
    return layer(x, x)


# The layer around, the layers that it bypasses, and the call. A mixture runs its experts in one product.
BYPASSED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], list[nn.Module]], Callable[..., Tensor]]] = {
    "mlp": (lambda: FusedMLP(D), lambda mlp: [mlp.up], into_mlp),
    "experts": (
        lambda: MixtureOfExperts(D, num_experts=2, top_k=2),
        lambda mixture: [*mixture.experts, *(expert.up for expert in mixture.experts)],
        into_mlp,
    ),
    "layer norm": (lambda: LayerNorm(D), lambda norm: [norm], into_add),
    "rms norm": (lambda: RMSNorm(D), lambda norm: [norm], into_add),
    "fused": (lambda: FusedBiasDropoutResidualLayerNorm(0.0, D), lambda layer: [layer.norm], into_layer),
}


@contextmanager
def with_a_hook_of_all_modules(layers: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """As profilers of modules set it."""
    called: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, inputs, output: called.append(module))
    try:
        yield called
    finally:
        handle.remove()


@contextmanager
def with_forwards_of_their_own(layers: list[nn.Module]) -> Iterator[list[nn.Module]]:
    called: list[nn.Module] = []

    def patch(layer: Any) -> None:
        own = layer.forward

        def forward(x: Tensor) -> Any:
            called.append(layer)
            return own(x)

        layer.forward = forward

    for layer in layers:
        patch(layer)
    yield called


@pytest.mark.parametrize("change", [with_a_hook_of_all_modules, with_forwards_of_their_own])
@pytest.mark.parametrize("name", list(BYPASSED))
def test_a_layer_is_called_once_its_call_does_more_than_its_class(name: str, change: Any) -> None:
    make, bypassed, call = BYPASSED[name]
    module, x = make(), torch.randn(3, D)
    wanted, layers = call(module, x), bypassed(module)
    with change(layers) as called:
        got = call(module, x)
    torch.testing.assert_close(got, wanted)
    assert all(any(layer is other for other in called) for layer in layers)


class Quantised(Tensor):
    """A weight of signs. Of torch's functions only `F.linear` can compute with it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, weight.as_subclass(Tensor).sign(), bias)
        assert function is not Tensor.__getitem__
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_quantised_layer_is_called() -> None:
    attention, inputs = MultiHeadAttention(D, num_heads=2), {"memory": torch.randn(2, 5, D)}
    quantised, x = copy.deepcopy(attention), torch.randn(2, 3, D)
    with torch.no_grad():
        weight = nn.Parameter(attention.qkv.weight.as_subclass(Quantised), requires_grad=False)
        quantised.qkv.weight = weight
        attention.qkv.weight.copy_(attention.qkv.weight.sign())
        torch.testing.assert_close(quantised(x, **inputs), attention(x, **inputs))
