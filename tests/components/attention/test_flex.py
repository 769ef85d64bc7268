"""The flex kernel gives the numbers of the reference and of the other kernels."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tests.components.attention.contract import HIDDEN_DIM, INPUTS, TOKENS, assert_is, inputs_of, made
from tests.components.attention.reference import multi_head
from tests.components.call import Call
from tests.components.compare import assert_same_step


@pytest.mark.parametrize(
    ("options", "inputs"),
    [
        ({}, ()),
        ({"causal": False}, ("key_padding_mask", "mask")),
        ({"num_kv_heads": 2, "sinks": True}, ("bias",)),
        ({"window": 3, "soft_cap": 0.7, "sinks": True}, ("key_padding_mask",)),
        ({"causal": False, "window": 3}, ("mask", "bias")),
        ({"causal": False, "sinks": True, "scale": 0.3}, INPUTS),
        ({"num_kv_heads": 1, "window": 1, "qk_norm": "rms_norm", "soft_cap": 0.7}, INPUTS),
    ],
    ids=str,
)
@pytest.mark.usefixtures("flex_with_gradients")
def test_flex_is_the_same(options: dict[str, Any], inputs: tuple[str, ...]) -> None:
    assert_is(made(kernel="flex", **options), multi_head, inputs)


@pytest.mark.usefixtures("flex_with_gradients")
def test_a_block_mask_is_a_mask() -> None:
    allowed = inputs_of(("mask",))["mask"][0, 0]
    blocks = create_block_mask(lambda b, h, t, s: allowed[t, s], None, None, TOKENS, TOKENS, device="cpu")
    flex, plain = made(kernel="flex", window=4, sinks=True), made(kernel="plain", window=4, sinks=True)
    plain.load_state_dict(flex.state_dict())
    x = torch.randn(2, TOKENS, HIDDEN_DIM, dtype=torch.float64)
    calls = (Call(layer, type(layer).forward, {"mask": mask}) for layer, mask in ((plain, allowed), (flex, blocks)))
    assert_same_step(*calls, x, rtol=1e-9, atol=1e-9)
