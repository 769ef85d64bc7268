import pytest
import torch
from torch import nn

from fuselayers.components import FusedBiasActivationDropout, FusedBiasDropoutResidual

LAYERS = [FusedBiasActivationDropout, FusedBiasDropoutResidual]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_bias_is_a_parameter_that_starts_at_zero_or_none(layer: type[nn.Module]) -> None:
    with_bias = layer(0.25, 4, backend=None)
    assert {name: value.tolist() for name, value in with_bias.named_parameters()} == {"bias": [0.0] * 4}
    assert not list(layer(0.25, backend=None).parameters())
    assert repr(layer(0.25, 4, backend="eager")).endswith("p=0.25, bias_shape=4, backend='eager', partition='min_cut')")


@pytest.mark.parametrize("layer", LAYERS)
def test_a_misspelt_backend_is_found_when_the_layer_is_built(layer: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="no backend 'egaer'; did you mean 'eager'"):
        layer(0.25, backend="egaer")


@pytest.mark.parametrize("layer", LAYERS)
def test_sizes_and_probabilities_are_checked(layer: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"^bias_shape must be at least 1, got 0$"):
        layer(0.25, 0)
    with pytest.raises(ValueError, match=r"^p must be at least 0 and below 1, got 1\.0$"):
        layer(1.0)


def test_nothing_is_dropped_in_eval_mode() -> None:
    layer = FusedBiasDropoutResidual(0.9, 4, backend=None).eval()
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(layer(x, residual), x + residual)
