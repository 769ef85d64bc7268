"""Every norm op is its formula, in numbers that share no code with the library."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.partition import fuse
from tests.ops import truth
from tests.ops.contract import seed_of, tensors


def inputs() -> list[Tensor]:
    """x, residual, weight, the norm's bias, x's bias."""
    return tensors((3, 21), (3, 21), (21,), (21,), (21,), dtype=torch.float64)


def test_norms() -> None:
    x, residual, weight, shift, _ = inputs()
    total = x + residual
    for got, expected in (
        (ops.layer_norm(x, weight=weight, bias=shift), truth.layer_norm(x, weight, shift, 1e-5)),
        (ops.layer_norm(x, weight=weight), truth.layer_norm(x, weight, torch.zeros(21), 1e-5)),
        (ops.rms_norm(x, weight=weight), truth.rms_norm(x, weight, 1e-6)),
        (
            ops.residual_layer_norm(x, residual, weight=weight, bias=shift),
            (truth.layer_norm(total, weight, shift, 1e-5), total),
        ),
        (ops.residual_rms_norm(x, residual, weight=weight), (truth.rms_norm(total, weight, 1e-6), total)),
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
def test_norms_after_dropout(style: Any, rms: bool) -> None:
    x, residual, weight, shift, bias = inputs()
    dropped = (x + bias) * truth.dropout_factor(seed_of(), x.shape, 0.3)
    total = dropped + residual
    summand = dropped if style == "pre" else total
    options = {"weight": weight, "bias": bias, "p": 0.3, "style": style, "seed": seed_of()}
    if rms:
        got = ops.bias_dropout_residual_rms_norm(x, residual, **options)
        normed = truth.rms_norm(summand, weight, 1e-6)
    else:
        got = ops.bias_dropout_residual_layer_norm(x, residual, norm_bias=shift, **options)
        normed = truth.layer_norm(summand, weight, shift, 1e-5)
    expected = {"post": normed, "pre": normed + residual, "prenorm": (normed, total)}[style]
    torch.testing.assert_close(got, expected)


def residual_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return ops.residual_layer_norm(x, residual, weight=weight, bias=bias)


# Each form decides the results' dtypes in separate code: the op, two tracers, and the fusion core.
@pytest.mark.parametrize(
    "form",
    [
        residual_layer_norm,
        pytest.param(torch.compile(residual_layer_norm), id="inductor", marks=pytest.mark.slow),
        pytest.param(torch.compile(residual_layer_norm, backend="aot_eager"), id="aot_eager"),
        pytest.param(fuse(residual_layer_norm, backend="eager"), id="fuse"),
    ],
)
@pytest.mark.parametrize(
    ("stream", "parameters"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
def test_results_have_the_dtype_of_the_sum(form: Any, stream: torch.dtype, parameters: torch.dtype) -> None:
    x, residual, weight, bias = tensors((3, 21), (3, 21), (21,), (21,))
    y, total = form(x.bfloat16(), residual.to(stream), weight.to(parameters), bias.to(parameters))
    assert (y.dtype, total.dtype) == (stream, stream)
