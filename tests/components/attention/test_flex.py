"""The kernel of flex attention: the same numbers as the other kernels, and as written out."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from fuselayers.components import MultiHeadAttention
from fuselayers.components.attention import kernels
from tests.components.attention.calls import HIDDEN_DIM, INPUTS, TOKENS, Call, assert_as_written_out, inputs_of, made
from tests.components.compare import assert_same_step, run


@pytest.mark.parametrize(
    ("options", "inputs"),
    [
        ({}, ()),
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
    assert_as_written_out(made(kernel="flex", **options), inputs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's kernel")
@pytest.mark.parametrize("options", [{"window": 70}, {"soft_cap": 5.0}, {"sinks": True, "num_kv_heads": 2}], ids=str)
def test_on_a_gpu_flex_is_chosen_and_right(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    flex = kernels.flex
    monkeypatch.setattr(kernels, "flex", lambda *args: called.append(1) or flex(*args))
    layer = MultiHeadAttention(128, num_heads=4, **options).to("cuda", torch.bfloat16)
    plain = MultiHeadAttention(128, num_heads=4, kernel="plain", **options).to("cuda", torch.float64)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 257, 128, device="cuda", dtype=torch.bfloat16)
    expected, got = run(plain, [x.double()]), run(layer, [x])
    assert called
    for name, value in expected.items():
        error = (got[name].double() - value).abs().max() / value.abs().max()
        assert error < 0.03, name


@pytest.mark.usefixtures("flex_with_gradients")
def test_a_block_mask_is_a_mask() -> None:
    allowed = inputs_of(("mask",))["mask"][0, 0]
    blocks = create_block_mask(lambda b, h, t, s: allowed[t, s], None, None, TOKENS, TOKENS, device="cpu")
    flex, plain = made(kernel="flex", window=4, sinks=True), made(kernel="plain", window=4, sinks=True)
    plain.load_state_dict(flex.state_dict())
    x = torch.randn(2, TOKENS, HIDDEN_DIM, dtype=torch.float64)
    calls = (Call(layer, {"mask": m}, written_out=False, names=()) for layer, m in ((plain, allowed), (flex, blocks)))
    assert_same_step(*calls, x, rtol=1e-9, atol=1e-9)
