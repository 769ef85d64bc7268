import math

import pytest
import torch
from torch import Tensor

from fuselayers.components import LocalAttention
from tests.components.attention import contract
from tests.components.attention.contract import HEADS, HIDDEN_DIM, allowed, heads_of, joined, small


def made(**options: object) -> LocalAttention:
    return small(LocalAttention(HIDDEN_DIM, **{"num_heads": 6, "window": 3, "causal": True, **options}))


def reference(layer: LocalAttention, x_BTD: Tensor, rotate: object, real_BT: Tensor | None) -> Tensor:
    q, k, v = heads_of(layer, x_BTD, rotate)
    band = allowed(x_BTD.shape[1], real_BT, causal=layer.causal, window=layer.window)
    scores = q @ k.mT / math.sqrt(layer.head_dim)
    # A row that sees no key has no gradient either; the softmax of an empty row would give nan.
    scores = torch.where(band.any(-1, keepdim=True), scores.masked_fill(~band, -math.inf), 0.0)
    return joined(layer, (scores.softmax(-1) * band) @ v)


# Queries run in blocks as long as the window. A single block, whole blocks and a shorter last block differ in masks.
@pytest.mark.parametrize(("tokens", "window"), [(1, 3), (7, 1), (7, 2), (7, 7), (7, 50), (129, 16), (129, 43)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("padded", "rotated", "heads"), [(False, False, "all heads"), (True, True, "grouped")])
def test_values_and_gradients(heads: str, rotated: bool, padded: bool, causal: bool, tokens: int, window: int) -> None:
    layer = made(causal=causal, window=window, **HEADS[heads])
    contract.assert_is(layer, reference, tokens=tokens, padded=padded, rotated=rotated)
