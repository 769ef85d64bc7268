import copy
import pickle
import re

import pytest
import torch

from fuselayers.components import GatedMLP
from tests.components.compare import assert_same_step, randomise


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_swiglu(bias: bool) -> None:
    layer = randomise(GatedMLP(6, bias=bias))
    x = torch.randn(3, 5, 6)
    gate, up, down = layer.gate, layer.up, layer.down
    gated = x @ gate.weight.T + (gate.bias if bias else 0)
    product = gated * torch.sigmoid(gated) * (x @ up.weight.T + (up.bias if bias else 0))
    torch.testing.assert_close(layer(x), product @ down.weight.T + (down.bias if bias else 0), rtol=1e-5, atol=1e-4)


def test_fused_is_plain() -> None:
    plain = randomise(GatedMLP(6, dropout=0.4))
    fused = GatedMLP(6, dropout=0.4, backend="eager")
    fused.load_state_dict(plain.state_dict())
    assert_same_step(plain, fused, torch.randn(9, 6), rtol=1e-4, atol=1e-4)
    x = torch.randn(4, 6)
    torch.testing.assert_close(fused.eval()(x), plain.eval()(x))
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        torch.testing.assert_close(other(x), fused(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("hidden_dim", "expansion", "multiple_of", "width"),
    [(96, 8 / 3, 1, 256), (64, 8 / 3, 1, 170), (64, 8 / 3, 32, 192), (64, 2.0, 32, 128), (3, 0.4, 8, 8)],
)
def test_the_hidden_width_is_rounded_up_to_a_multiple(
    hidden_dim: int, expansion: float, multiple_of: int, width: int
) -> None:
    layer = GatedMLP(hidden_dim, expansion=expansion, multiple_of=multiple_of)
    assert [layer.gate.out_features, layer.up.out_features, layer.down.in_features] == [width] * 3


def test_a_hidden_width_of_nothing() -> None:
    text = "expansion must give at least one hidden value, got 0.1 for hidden_dim 4"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        GatedMLP(4, expansion=0.1)
