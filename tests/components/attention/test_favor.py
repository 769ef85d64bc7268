import copy
import math

import pytest
import torch
from torch import Tensor

from fuselayers.components import FavorAttention
from tests.components.attention import contract
from tests.components.attention.contract import (
    HEADS,
    HIDDEN_DIM,
    MEMORY,
    MEMORY_CASES,
    allowed,
    heads_of,
    joined,
    small,
)
from tests.components.compare import run


def made(**options: object) -> FavorAttention:
    return small(FavorAttention(HIDDEN_DIM, **{"num_heads": 6, "num_features": 5, "causal": True, **options}))


def reference(
    layer: FavorAttention, x_BTD: Tensor, rotate: object, real_BT: Tensor | None, memory: Tensor | None = None
) -> Tensor:
    q, k, v = heads_of(layer, x_BTD, rotate)
    if memory is None:
        pairs = allowed(x_BTD.shape[1], real_BT, causal=layer.causal)
    else:
        _, k, v = heads_of(layer, memory, None)
        pairs = torch.ones(1) if real_BT is None else real_BT[:, None, None]
    w, scale = layer.directions, layer.head_dim**0.25
    q, k = (
        torch.exp(x / scale @ w.T - ((x / scale) ** 2).sum(-1, keepdim=True) / 2) / math.sqrt(layer.num_features)
        for x in (q, k)
    )
    weights = q @ k.mT * pairs
    below = weights.sum(-1, keepdim=True)
    return joined(layer, weights @ v / torch.where(below > 0, below, 1))


# Two of the eight ways to combine padding, rotation and grouped heads: none of them, and all.
@pytest.mark.parametrize("tokens", [1, 7, 129])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("padded", "rotated", "heads"), [(False, False, "all heads"), (True, True, "grouped")])
def test_values_and_gradients(heads: str, rotated: bool, padded: bool, causal: bool, tokens: int) -> None:
    contract.assert_is(made(causal=causal, **HEADS[heads]), reference, tokens=tokens, padded=padded, rotated=rotated)


@pytest.mark.parametrize(("tokens", "padded"), MEMORY_CASES)
def test_a_memory(tokens: int, padded: bool) -> None:
    layer = made(causal=False, num_kv_heads=2)
    contract.assert_is(layer, reference, tokens=tokens, memory=MEMORY, padded=padded)


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
    written_out = run(lambda x: reference(exact, x, None, None)[:, others], [x.double()])
    got = run(lambda x: layer(x)[:, others], [x])
    for name, expected in written_out.items():
        error, value = got[name].double() - expected, expected
        if name == "gradient of input 0":  # at `place` it is far larger
            error, value = error[:, others], value[:, others]
        assert error.abs().max() < 1e-3 * value.abs().max(), name
    # Beside a short key, later tokens count for nothing: their exact gradients are below float32's rounding.
    counted = others if long else others & (torch.arange(129) < place)
    assert got["gradient of input 0"][:, counted].abs().amax(-1).min() > 0
