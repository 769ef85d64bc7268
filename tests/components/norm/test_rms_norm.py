import warnings

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import RMSNorm
from tests.components.compare import assert_same_step, randomise


def test_it_is_torchs_with_torchs_keys() -> None:
    torchs = randomise(nn.RMSNorm(7, eps=0.01))
    ours = RMSNorm(7, eps=0.01)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    ours.load_state_dict(torchs.state_dict())
    assert_same_step(torchs, ours, torch.randn(3, 5, 7))


def test_it_is_its_formula() -> None:
    norm = randomise(RMSNorm(7, eps=0.5))

    def formula(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt() * norm.weight

    x = torch.randn(3, 7)
    torch.testing.assert_close(norm(x), formula(x))


def test_a_bfloat16_input_with_a_float32_weight_keeps_its_dtype_and_warns_of_nothing() -> None:
    norm = randomise(RMSNorm(64))
    x = torch.randn(8, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = norm(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), norm(x), rtol=0.02, atol=0.02)


def test_error() -> None:
    with pytest.raises(ValueError, match=r"^hidden_dim must be at least 1, got -3$"):
        RMSNorm(-3)
