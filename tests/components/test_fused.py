"""The fused layers that call a single op: values and gradients by their formula, and errors."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import (
    FusedBiasActivationDropout,
    FusedBiasDropoutResidual,
    FusedBiasDropoutResidualLayerNorm,
)
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, randomise

STYLES = ("post", "pre", "prenorm")
MADE: dict[str, Callable[..., nn.Module]] = {
    "activation": lambda p, bias, **options: FusedBiasActivationDropout(p, bias, activation="gelu", **options),
    "residual": FusedBiasDropoutResidual,
    **{
        style: lambda p, bias, style=style, **options: FusedBiasDropoutResidualLayerNorm(
            p, 7, bias_shape=bias, style=style, eps=0.1, **options
        )
        for style in STYLES
    },
}


def written_out(layer: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """The formula of a fused layer."""
    biased = x if layer.bias is None else x + layer.bias
    if residual is None:
        return dropout(nn.functional.gelu(biased), layer.p, training=layer.training)
    dropped = dropout(biased, layer.p, training=layer.training)
    style = getattr(layer, "style", None)
    if style is None:
        return dropped + residual
    normed = functools.partial(
        nn.functional.layer_norm, normalized_shape=(7,), weight=layer.norm.weight, bias=layer.norm.bias, eps=0.1
    )
    if style == "pre":
        return normed(dropped) + residual
    total = dropped + residual
    return (normed(total), total) if style == "prenorm" else normed(total)


def inputs_of(name: str, *shape: int) -> list[Tensor]:
    return [torch.randn(shape) for _ in range(1 if name == "activation" else 2)]


# Each layer has its own kernels. Dropout, a bias and the backend select other branches of them.
@pytest.mark.parametrize(
    ("backend", "p", "bias"), [("auto", 0.0, 7), ("auto", 0.3, 7), ("auto", 0.3, None), ("eager", 0.3, 7)]
)
@pytest.mark.parametrize("name", MADE)
def test_training_and_eval(name: str, backend: str, p: float, bias: int | None) -> None:
    layer = randomise(MADE[name](p, bias, backend=backend))
    formula, inputs = functools.partial(written_out, layer), inputs_of(name, 5, 3, 7)
    assert_same_step(formula, layer, *inputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.eval()(*inputs), formula(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "arguments", "text"),
    [
        (FusedBiasActivationDropout, {"p": 1.5}, "p must be at least 0 and at most 1, got 1.5"),
        (FusedBiasActivationDropout, {"bias_shape": 0}, "bias_shape must be at least 1, got 0"),
        (FusedBiasActivationDropout, {"activation": "glue"}, "no activation 'glue'; did you mean 'gelu'?"),
        (FusedBiasDropoutResidualLayerNorm, {"d_model": 0}, "d_model must be at least 1, got 0"),
        (
            FusedBiasDropoutResidualLayerNorm,
            {"d_model": 4, "bias_shape": 5},
            "bias_shape must be d_model 4 or None, got 5",
        ),
        (
            FusedBiasDropoutResidualLayerNorm,
            {"d_model": 4, "style": "posted"},
            "no style 'posted'; did you mean 'post'?",
        ),
    ],
)
def test_errors(layer: type[nn.Module], arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        layer(**{"p": 0.1, **arguments})
