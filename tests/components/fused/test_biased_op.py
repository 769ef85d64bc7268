from collections.abc import Callable

import pytest
import torch
from torch import nn

from fuselayers.components import (
    FusedBiasActivationDropout,
    FusedBiasDropoutResidual,
    FusedBiasDropoutResidualLayerNorm,
)

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


@pytest.mark.parametrize("backend", [None, "eager"])
def test_behind_a_matmul_under_autocast_it_stays_in_bfloat16(backend: str | None) -> None:
    first = FusedBiasActivationDropout(0.0, 4, activation="relu", backend=backend)
    second = FusedBiasDropoutResidual(0.0, 4, backend=backend)
    for layer in (first, second):
        nn.init.normal_(layer.bias)
    linear = nn.Linear(4, 4, bias=False)
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    exact = (linear(x) + first.bias).relu(), linear(x) + second.bias + residual
    with torch.autocast("cpu", torch.bfloat16):
        z = linear(x)
        activated, added = first(z), second(z, residual.bfloat16())
        assert activated.dtype == added.dtype == torch.bfloat16
        assert second(z, residual).dtype == torch.float32  # a stream in float32 stays one
    for got, expected in zip((activated, added), exact, strict=True):
        torch.testing.assert_close(got.float(), expected, rtol=0.03, atol=0.03)
    added.sum().backward()
    assert second.bias.grad.dtype == torch.float32
    assert second.bias.grad.eq(3).all()


@pytest.mark.parametrize(
    "build",
    [
        lambda: FusedBiasActivationDropout(0.1, 4),
        lambda: FusedBiasDropoutResidual(0.1, 4),
        lambda: FusedBiasDropoutResidualLayerNorm(0.1, 4, bias_shape=4),
    ],
)
def test_a_layer_without_memory_is_filled_anew(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        layer = build()
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    for part in layer.modules():
        part.reset_parameters()  # type: ignore[operator]
    expected = build().state_dict()
    assert layer.state_dict().keys() == expected.keys()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_without_a_bias_there_is_nothing_to_fill() -> None:
    layer = FusedBiasActivationDropout(0.1)
    layer.reset_parameters()
    assert layer.bias is None
