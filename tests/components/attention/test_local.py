import math
import re

import pytest
import torch
from torch import Tensor

from fuselayers.components import Decoder, Encoder, LocalAttention, MultiHeadAttention
from fuselayers.partition import saved_bytes
from tests.components.attention import contract
from tests.components.attention.contract import HEADS, HIDDEN_DIM, allowed, heads_of, joined, small


def made(**options: object) -> LocalAttention:
    return small(LocalAttention(HIDDEN_DIM, **{"num_heads": 6, "window": 3, **options}))


def reference(layer: LocalAttention, x_BTD: Tensor, rotate: object, real_BT: Tensor | None) -> Tensor:
    q, k, v = heads_of(layer, x_BTD, rotate)
    band = allowed(x_BTD.shape[1], real_BT, causal=layer.causal, window=layer.window)
    scores = q @ k.mT / math.sqrt(layer.head_dim)
    # A row with nothing to look at has no gradient either; nan from a softmax over nothing would.
    scores = torch.where(band.any(-1, keepdim=True), scores.masked_fill(~band, -math.inf), 0.0)
    return joined(layer, (scores.softmax(-1) * band) @ v)


@pytest.mark.parametrize(
    ("tokens", "window"), [(1, 1), (1, 3), (7, 1), (7, 2), (7, 3), (7, 7), (7, 50), (129, 16), (129, 43)]
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("rotated", "heads"), [(False, "all heads"), (True, "grouped")])
def test_values_and_gradients(heads: str, rotated: bool, padded: bool, causal: bool, tokens: int, window: int) -> None:
    layer = made(causal=causal, window=window, **HEADS[heads])
    contract.assert_is(layer, reference, tokens=tokens, padded=padded, rotated=rotated)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_over_all_tokens_is_full_attention(causal: bool) -> None:
    layer = made(causal=causal, window=7, num_kv_heads=2)
    exact = MultiHeadAttention(HIDDEN_DIM, num_heads=6, num_kv_heads=2, causal=causal)
    exact.load_state_dict(layer.state_dict())
    x, real_BT = torch.randn(4, 7, HIDDEN_DIM), contract.padding(7)
    torch.testing.assert_close(layer(x), exact(x), rtol=1e-4, atol=1e-5)
    got, expected = layer(x, key_padding_mask=real_BT), exact(x, key_padding_mask=real_BT)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_causal_and_padding(p: float) -> None:
    contract.assert_causal(made(num_kv_heads=2, dropout=p).eval())
    for causal in (True, False):
        contract.assert_padding_is_nothing(made(num_kv_heads=2, causal=causal, dropout=p).eval())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_what_backward_keeps_grows_with_the_tokens(p: float, causal: bool) -> None:
    layer = made(window=8, dropout=p, causal=causal)
    few, many = (saved_bytes(layer, torch.randn(1, tokens, HIDDEN_DIM)) for tokens in (64, 256))
    assert many < 4.2 * few


@pytest.mark.slow
def test_forms() -> None:
    contract.assert_forms(made(num_kv_heads=2, dropout=0.3), rotated=True)
    contract.assert_forms(made(num_kv_heads=2, causal=False), rotated=True)


def test_built_on_meta() -> None:
    contract.assert_built_on_meta(made)


@pytest.mark.parametrize("model", [Encoder, Decoder])
def test_a_step_of_training(model: type[Encoder | Decoder]) -> None:
    contract.assert_trains(model, "local", num_heads=6, window=3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"dropout": -0.5}, "dropout must be at least 0 and below 1, got -0.5"),
    ],
)
def test_errors(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        made(**options)
