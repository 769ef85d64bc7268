import re

import pytest
import torch

from fuselayers.components import MLP
from fuselayers.ops import ACTIVATIONS
from tests.components.compare import randomise


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_two_linears_around_an_activation(activation: str | None, bias: bool) -> None:
    layer = randomise(MLP(7, expansion=2.0, activation=activation, bias=bias)).eval()
    x = torch.randn(3, 5, 7)
    hidden = x @ layer.up.weight.T + (layer.up.bias if bias else 0)
    hidden = hidden if activation is None else ACTIVATIONS[activation](hidden)
    expected = hidden @ layer.down.weight.T + (layer.down.bias if bias else 0)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(("expansion", "width"), [(4.0, 28), (1.5, 10), (1 / 7, 1)])
def test_the_hidden_width_is_rounded_down(expansion: float, width: int) -> None:
    layer = MLP(7, expansion=expansion)
    assert (layer.up.out_features, layer.down.in_features) == (width, width)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"hidden_dim": 0}, "hidden_dim must be at least 1, got 0"),
        ({"expansion": 0.1}, "expansion must give at least one hidden value, got 0.1 for hidden_dim 4"),
        ({"expansion": -1.0}, "expansion must be above 0, got -1.0"),
        ({"dropout": 1.5}, "dropout must be at least 0 and at most 1, got 1.5"),
        ({"dropout": -0.5}, "dropout must be at least 0 and at most 1, got -0.5"),
        ({"activation": "gleu"}, "no activation 'gleu'; did you mean 'gelu'?"),
    ],
)
def test_errors(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        MLP(**{"hidden_dim": 4, **arguments})  # type: ignore[arg-type]
