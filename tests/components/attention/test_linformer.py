import copy
import math

import pytest
import torch
from torch import Tensor

from fuselayers.components import LinformerAttention
from tests.components.adapter import Adapter
from tests.components.attention import contract
from tests.components.attention.contract import HEADS, HIDDEN_DIM, heads_of, joined, small


def made(**options: object) -> LinformerAttention:
    chosen = {"num_heads": 6, "context_length": 131, "projected_length": 5, **options}
    return small(LinformerAttention(HIDDEN_DIM, **chosen))


def reference(layer: LinformerAttention, x_BTD: Tensor, rotate: object, real_BT: Tensor | None) -> Tensor:
    """The whole context, with zeros for padded and missing tokens."""
    q, k, v = heads_of(layer, x_BTD, rotate)
    of_keys, of_values = layer.key_projection.weight, layer.value_projection.weight
    whole = torch.zeros(2, *k.shape[:2], of_keys.shape[1], layer.head_dim, dtype=k.dtype)
    real = torch.ones(x_BTD.shape[:2]) if real_BT is None else real_BT.to(k.dtype)
    whole[:, :, :, : x_BTD.shape[1]] = torch.stack((k, v)) * real[:, None, :, None]
    keys = torch.einsum("pl,bhlc->bhpc", of_keys, whole[0])
    values = torch.einsum("pl,bhlc->bhpc", of_values, whole[1])
    return joined(layer, (q @ keys.mT / math.sqrt(layer.head_dim)).softmax(-1) @ values)


# Two of the eight ways to combine padding, rotation and grouped heads: none of them, and all.
@pytest.mark.parametrize("tokens", [1, 7, 129, 131])
@pytest.mark.parametrize(("padded", "rotated", "heads"), [(False, False, "all heads"), (True, True, "grouped")])
def test_values_and_gradients(heads: str, rotated: bool, padded: bool, tokens: int) -> None:
    contract.assert_is(made(**HEADS[heads]), reference, tokens=tokens, padded=padded, rotated=rotated)


@pytest.mark.parametrize(("padded", "tokens"), [(False, 1), (True, 7), (False, 11)])
def test_an_adapter_in_place_of_a_projection_is_called(padded: bool, tokens: int) -> None:
    merged = made(context_length=11, num_kv_heads=2).double()
    adapted = copy.deepcopy(merged)
    with torch.no_grad():
        for name in ("key_projection", "value_projection"):
            adapter = Adapter(getattr(adapted, name)).double()
            setattr(adapted, name, adapter)
            getattr(merged, name).weight.add_(adapter.high @ adapter.low)
    x, real_BT = torch.randn(4, tokens, HIDDEN_DIM).double(), contract.padding(tokens) if padded else None
    got, expected = (layer(x, key_padding_mask=real_BT) for layer in (adapted, merged))
    torch.testing.assert_close(got, expected)


def test_a_sequence_that_is_too_long() -> None:
    text = (
        "a sequence of 8 tokens does not fit the context_length 7; "
        "shorten it, or build the attention with a longer context"
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        made(context_length=7)(torch.zeros(1, 8, HIDDEN_DIM))
