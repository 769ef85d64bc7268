import pytest
import torch
from torch import nn

from fuselayers.components import MLP, FusedMLP, GatedMLP, LayerNorm, RMSNorm
from fuselayers.components.checks import check_positive


@pytest.mark.parametrize("value", [0, -3])
def test_a_size_is_at_least_one(value: int) -> None:
    check_positive("num_heads", 1)
    with pytest.raises(ValueError, match=rf"^num_heads must be at least 1, got {value}$"):
        check_positive("num_heads", value)


@pytest.mark.parametrize("layer", [MLP(8), FusedMLP(8), GatedMLP(8), LayerNorm(8), RMSNorm(8)])
def test_every_layer_says_which_width_it_wants(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"^x must be \[\.\.\., 8\], got \[2, 7\]$"):
        layer(torch.ones(2, 7))


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_eps_is_not_negative(norm: type) -> None:
    norm(8, eps=0.0)
    with pytest.raises(ValueError, match=r"^eps must be 0 or more, got -1$"):
        norm(8, eps=-1)
