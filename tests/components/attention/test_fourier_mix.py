import math

import pytest
import torch
from torch import Tensor

from fuselayers.components import FourierMix
from fuselayers.partition import saved_bytes
from tests.components.attention import contract
from tests.components.attention.contract import HIDDEN_DIM


def reference(layer: FourierMix, x_BTD: Tensor, rotate: object, real_BT: Tensor | None) -> Tensor:
    tokens, channels = x_BTD.shape[1:]
    t, d = torch.arange(tokens, dtype=x_BTD.dtype), torch.arange(channels, dtype=x_BTD.dtype)
    of_tokens, of_channels = t[:, None] * t / tokens, d[:, None] * d / channels
    angles = 2 * math.pi * (of_tokens[:, None, :, None] + of_channels[None, :, None, :])
    x = x_BTD if real_BT is None else x_BTD * real_BT[..., None]
    return torch.einsum("tdse,bse->btd", angles.cos(), x)


# Padding is zeroed before the transform. A single token is its own spectrum.
@pytest.mark.parametrize("tokens", [1, 7, 129])
@pytest.mark.parametrize("padded", [True, False])
def test_values_and_gradients(padded: bool, tokens: int) -> None:
    contract.assert_is(FourierMix(HIDDEN_DIM), reference, tokens=tokens, padded=padded)


def test_backward_keeps_nothing() -> None:
    assert saved_bytes(FourierMix(HIDDEN_DIM), torch.randn(1, 16, HIDDEN_DIM, requires_grad=True)) == 0
