import re

import pytest
import torch
from torch import Tensor

from fuselayers.components import ConvMLP
from fuselayers.ops import ACTIVATIONS
from tests.components.call import Call
from tests.components.compare import assert_same_step, randomise


def written_out(layer: ConvMLP, x_BTD: Tensor) -> Tensor:
    """The formula, token by token and tap by tap."""
    hidden = x_BTD @ layer.up.weight.T + layer.up.bias
    taps = layer.conv.weight.shape[-1]
    rows = []
    for token in range(x_BTD.shape[1]):
        row = layer.conv.bias.expand_as(hidden[:, 0])
        for tap in range(taps):
            seen = token + tap - (taps - 1 if layer.causal else (taps - 1) // 2)
            if 0 <= seen < x_BTD.shape[1]:
                row = row + layer.conv.weight[:, 0, tap] * hidden[:, seen]
        rows.append(row)
    return ACTIVATIONS["gelu"](torch.stack(rows, dim=1)) @ layer.down.weight.T + layer.down.bias


@pytest.mark.parametrize(
    ("kernel_size", "causal", "tokens"),
    [(1, True, 7), (2, True, 7), (3, True, 1), (7, True, 7), (3, False, 7), (7, False, 1), (7, False, 7)],
)
def test_it_is_its_formula(kernel_size: int, causal: bool, tokens: int) -> None:
    layer = ConvMLP(5, kernel_size=kernel_size, width=9, causal=causal)
    randomise(layer).double()
    x = torch.randn(3, tokens, 5, dtype=torch.float64)
    assert_same_step(Call(layer, written_out, {}), Call(layer, ConvMLP.forward, {}), x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_as_good_as_nothing(causal: bool) -> None:
    layer = randomise(ConvMLP(4, kernel_size=5, causal=causal)).double()
    x = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    real_BT = torch.ones(2, 9, dtype=torch.bool)
    real_BT[0, :3] = real_BT[1, 4:] = False
    y = layer(x, key_padding_mask=real_BT)
    torch.testing.assert_close(y[0, 3:], layer(x[:1, 3:])[0])
    torch.testing.assert_close(y[1, :4], layer(x[1:, :4])[0])
    (dx,) = torch.autograd.grad(y[real_BT].square().sum(), x)
    assert not dx[~real_BT].any()
    torch.testing.assert_close(layer(x, key_padding_mask=torch.ones_like(real_BT)), layer(x), rtol=0, atol=0)


def test_an_even_kernel() -> None:
    text = "kernel_size must be odd where the convolution is not causal, got 4; use 5"
    with pytest.raises(ValueError, match=f"^{text}$"):
        ConvMLP(4, kernel_size=4, causal=False)


def test_a_mask_of_another_shape() -> None:
    text = "key_padding_mask must be torch.bool [2, 3] to fit x [2, 3, 4], True for a real token, got torch.bool [3, 2]"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        ConvMLP(4)(torch.zeros(2, 3, 4), key_padding_mask=torch.ones(3, 2, dtype=torch.bool))
