import pytest
import torch
from torch import nn

from fuselayers.components import MLP, DynamicTanh, FusedMLP, GatedMLP, LayerNorm, RMSNorm


@pytest.mark.parametrize("layer", [MLP(8), FusedMLP(8), GatedMLP(8), LayerNorm(8), RMSNorm(8), DynamicTanh(8)])
def test_a_wrong_width_is_an_error_in_every_layer(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"^x must be \[\.\.\., 8\], got \[2, 7\]$"):
        layer(torch.ones(2, 7))
