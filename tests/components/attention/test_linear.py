import torch

from fuselayers.components import LinearAttention
from tests.components.attention.contract import HIDDEN_DIM


def test_keys_without_any_weight_are_no_division_by_zero() -> None:
    layer = LinearAttention(HIDDEN_DIM, num_heads=6, causal=True)
    with torch.no_grad():
        layer.qkv.weight.zero_()
        layer.qkv.bias.fill_(-200.0)  # exp(-200) is 0 in float32
    assert torch.equal(layer(torch.randn(1, 3, HIDDEN_DIM)), layer.out.bias.expand(1, 3, -1))


def test_float16_holds_sums_over_many_tokens() -> None:
    layer = LinearAttention(HIDDEN_DIM, num_heads=6, causal=False)
    with torch.no_grad():
        layer.qkv.weight.zero_()
        layer.qkv.bias.fill_(20.0)  # 4096 x 21 x 20 is far above float16's 65504
    x = torch.randn(1, 4096, HIDDEN_DIM)
    torch.testing.assert_close(layer.half()(x.half()).float(), layer.float()(x), rtol=1e-2, atol=0.1)
