import re

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import MLP, ConvMLP, FusedMLP, GatedMLP
from tests.components.call import Call
from tests.components.compare import assert_same_step, randomise
from tests.components.registered import registered


class Softplus(nn.Module):
    """A user's activation, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.log1p(torch.exp(self.beta * x)) / self.beta


@pytest.fixture(autouse=True)
def _own_activation() -> object:
    with registered("activation", my_softplus=Softplus):
        yield


def written_out(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer's formula for x [B, T, D]."""
    beta = layer.custom_activation.beta

    def act(z: Tensor) -> Tensor:
        return torch.logaddexp(beta * z, 0 * z) / beta

    if isinstance(layer, GatedMLP):
        weight = layer.gate_up.weight if layer.packed else torch.cat((layer.gate.weight, layer.up.weight))
        half = len(weight) // 2
        return (act(x @ weight[:half].T) * (x @ weight[half:].T)) @ layer.down.weight.T
    hidden = x @ layer.up.weight.T + layer.up.bias
    if isinstance(layer, ConvMLP):
        hidden = hidden * layer.conv.weight[:, 0, 0] + layer.conv.bias
    return act(hidden) @ layer.down.weight.T + layer.down.bias


@pytest.mark.parametrize(
    ("component", "options"),
    [
        (MLP, {}),
        (FusedMLP, {}),
        (FusedMLP, {"backend": "eager"}),
        (GatedMLP, {}),
        (GatedMLP, {"packed": True}),
        (GatedMLP, {"packed": True, "backend": "eager"}),
        (ConvMLP, {"kernel_size": 1}),
    ],
)
def test_a_custom_activation(component: type[nn.Module], options: dict[str, object]) -> None:
    layer = randomise(component(5, width=7, activation="my_softplus", **options)).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    calls = (Call(layer, function, {}) for function in (written_out, component.forward))
    assert_same_step(*calls, x, rtol=1e-10, atol=1e-10)


def test_a_misspelt_activation_lists_every_registered_one() -> None:
    text = (
        "no activation 'my_softpluss'; did you mean 'my_softplus'? there are: gelu, gelu_tanh, leaky_relu, "
        "my_softplus, relu, sigmoid, silu, smelu, squared_relu, star_relu"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        MLP(4, activation="my_softpluss")
