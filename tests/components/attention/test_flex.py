"""The flex kernel gives the numbers of the formula."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tests.components.attention.contract import HIDDEN_DIM, TOKENS, inputs_of, made
from tests.components.call import Call
from tests.components.compare import assert_same_step


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"window": 4, "sinks": True}, ()),
        ({"causal": False}, ("key_padding_mask",)),
        ({"num_kv_heads": 2, "sinks": True}, ("distance_bias",)),
        ({"window": 3, "soft_cap": 0.7, "sinks": True}, ("key_padding_mask",)),
        ({"causal": False, "window": 3, "scale": 0.3}, ("distance_bias",)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("flex_with_gradients")
def test_a_block_mask_is_a_mask(options: dict[str, Any], names: tuple[str, ...]) -> None:
    allowed = inputs_of(("mask",))["mask"][0, 0]
    blocks = create_block_mask(lambda b, h, t, s: allowed[t, s], None, None, TOKENS, TOKENS, device="cpu")
    flex, plain = made(kernel="flex", **options), made(kernel="plain", **options)
    plain.load_state_dict(flex.state_dict())
    x, inputs = torch.randn(4, TOKENS, HIDDEN_DIM, dtype=torch.float64), inputs_of(names)
    calls = (
        Call(layer, type(layer).forward, {**inputs, "mask": mask}) for layer, mask in ((plain, allowed), (flex, blocks))
    )
    assert_same_step(*calls, x, rtol=1e-9, atol=1e-9)


def test_without_a_block_mask_it_is_the_op() -> None:
    flex, plain = made(kernel="flex", window=3), made(kernel="plain", window=3)
    plain.load_state_dict(flex.state_dict())
    x = torch.randn(2, TOKENS, HIDDEN_DIM, dtype=torch.float64)
    torch.testing.assert_close(flex(x), plain(x))
