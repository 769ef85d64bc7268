from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops import bias_dropout_residual_layer_norm
from fuselayers.partition import saved_bytes
from tests.ops import truth
from tests.ops.contract import seed_of, tensors

STYLES = ("post", "pre", "prenorm")


def op(x: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor, bias: Tensor, **options: Any) -> Any:
    return bias_dropout_residual_layer_norm(x, residual, weight=weight, norm_bias=norm_bias, bias=bias, **options)


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return tensors(shape, shape, shape[-1:], shape[-1:], shape[-1:], dtype=dtype)


@pytest.mark.parametrize("style", STYLES)
def test_is_its_formula(style: str) -> None:
    x, residual, weight, norm_bias, bias = inputs_of((3, 21), torch.float64)
    dropped = (x + bias) * truth.dropout_factor(seed_of(), x.shape, 0.3)
    total = dropped + residual
    normed = truth.layer_norm(dropped if style == "pre" else total, weight, norm_bias, 1e-5)
    expected = {"post": normed, "pre": normed + residual, "prenorm": (normed, total)}[style]
    got = op(x, residual, weight, norm_bias, bias, p=0.3, style=style, seed=seed_of())
    torch.testing.assert_close(got, expected)


def test_backward_saves_the_sum_its_statistics_and_a_seed() -> None:
    x, residual = torch.randn(64, 128, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    weight = torch.ones(128, requires_grad=True)

    def call(x: Tensor, residual: Tensor) -> Tensor:
        return bias_dropout_residual_layer_norm(x, residual, weight=weight, p=0.1)

    assert saved_bytes(call, x, residual, parameters=(weight,)) == x.numel() * 4 + 64 * 2 * 4 + 8
