import pytest
import torch

from fuselayers.components import MLP
from fuselayers.ops import ACTIVATIONS
from tests.components.compare import randomise


@pytest.mark.parametrize(("activation", "bias"), [(None, False), *((name, True) for name in ACTIVATIONS)])
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
