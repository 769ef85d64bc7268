import pytest
import torch
from torch import Tensor

from fuselayers.components import LinearAttention
from tests.components.attention import contract
from tests.components.attention.contract import HEADS, HIDDEN_DIM, allowed, heads_of, joined, small


def made(**options: object) -> LinearAttention:
    return small(LinearAttention(HIDDEN_DIM, **{"num_heads": 6, "causal": True, **options}))


def reference(layer: LinearAttention, x_BTD: Tensor, rotate: object, real_BT: Tensor | None) -> Tensor:
    q, k, v = heads_of(layer, x_BTD, None)
    q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    turned_q, turned_k = (q, k) if rotate is None else rotate(q, k)  # type: ignore[operator]
    pairs = allowed(x_BTD.shape[1], real_BT, causal=layer.causal)
    below = (q @ k.mT * pairs).sum(-1, keepdim=True)
    return joined(layer, (turned_q @ turned_k.mT * pairs) @ v / torch.where(below > 0, below, 1))


# Two of the eight ways to combine padding, rotation and grouped heads: none of them, and all.
@pytest.mark.parametrize("tokens", [1, 7, 129])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("padded", "rotated", "heads"), [(False, False, "all heads"), (True, True, "grouped")])
def test_values_and_gradients(heads: str, rotated: bool, padded: bool, causal: bool, tokens: int) -> None:
    contract.assert_is(made(causal=causal, **HEADS[heads]), reference, tokens=tokens, padded=padded, rotated=rotated)


def test_keys_without_any_weight_are_no_division_by_zero() -> None:
    layer = made()
    with torch.no_grad():
        layer.qkv.weight.zero_()
        layer.qkv.bias.fill_(-200.0)  # exp(-200) is 0 in float32
    assert torch.equal(layer(torch.randn(1, 3, HIDDEN_DIM)), layer.out.bias.expand(1, 3, -1))


def test_float16_holds_sums_over_many_tokens() -> None:
    layer = made(causal=False)
    with torch.no_grad():
        layer.qkv.weight.zero_()
        layer.qkv.bias.fill_(20.0)  # 4096 x 21 x 20 is far above float16's 65504
    x = torch.randn(1, 4096, HIDDEN_DIM)
    torch.testing.assert_close(layer.half()(x.half()).float(), layer.float()(x), rtol=1e-2, atol=0.1)
