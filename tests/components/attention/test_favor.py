import copy

import pytest
import torch

from fuselayers.components import FavorAttention
from tests.components.attention.contract import HIDDEN_DIM, small
from tests.components.attention.reference import favor
from tests.components.compare import run


@pytest.mark.parametrize(
    ("long", "causal", "place"),
    [(True, True, 0), (True, True, 64), (True, False, 64), (True, True, 100), (False, True, 64), (False, True, 100)],
)
def test_a_key_unlike_all_others_leaves_them_as_they_are(long: bool, causal: bool, place: int) -> None:
    # The exponents of a long key are hundreds below the others', those of a short key hundreds above.
    layer = small(FavorAttention(HIDDEN_DIM, num_heads=1, num_features=64, causal=causal))
    x = 0.2 * torch.randn(1, 129, HIDDEN_DIM)
    with torch.no_grad():
        if long:
            x[:, place] *= 60
        else:
            keys = slice(HIDDEN_DIM, 2 * HIDDEN_DIM)
            layer.qkv.bias[keys] = 9.0
            x[:, place] = torch.linalg.solve(layer.qkv.weight[keys], -layer.qkv.bias[keys])
    others = torch.arange(129) != place
    exact = copy.deepcopy(layer).double()
    written_out = run(lambda x: favor(exact, x)[:, others], [x.double()])
    got = run(lambda x: layer(x)[:, others], [x])
    for name, expected in written_out.items():
        error, value = got[name].double() - expected, expected
        if name == "gradient of input 0":  # at `place` it is far larger
            error, value = error[:, others], value[:, others]
        assert error.abs().max() < 1e-3 * value.abs().max(), name
    # Beside a short key, later tokens count for nothing: their exact gradients are below float32's rounding.
    counted = others if long else others & (torch.arange(129) < place)
    assert got["gradient of input 0"][:, counted].abs().amax(-1).min() > 0
