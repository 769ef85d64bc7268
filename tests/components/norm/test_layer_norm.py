import pytest
import torch
from torch import nn

from fuselayers.components import LayerNorm
from tests.components.compare import assert_same_step, randomise


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_torchs_with_torchs_keys(bias: bool) -> None:
    torchs = randomise(nn.LayerNorm(7, eps=0.01, bias=bias))
    ours = LayerNorm(7, eps=0.01, bias=bias)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    ours.load_state_dict(torchs.state_dict())
    assert_same_step(torchs, ours, torch.randn(3, 5, 7))


def test_error() -> None:
    with pytest.raises(ValueError, match=r"^hidden_dim must be at least 1, got 0$"):
        LayerNorm(0)
