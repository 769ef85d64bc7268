from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops import bias_dropout_residual_rms_norm
from tests.ops import truth
from tests.ops.contract import seed_of, tensors

STYLES = ("post", "pre", "prenorm")


def op(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Any:
    return bias_dropout_residual_rms_norm(x, residual, weight=weight, bias=bias, **options)


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return tensors(shape, shape, shape[-1:], shape[-1:], dtype=dtype)


@pytest.mark.parametrize("style", STYLES)
def test_is_its_formula(style: str) -> None:
    x, residual, weight, bias = inputs_of((3, 21), torch.float64)
    dropped = (x + bias) * truth.dropout_factor(seed_of(), x.shape, 0.3)
    total = dropped + residual
    normed = truth.rms_norm(dropped if style == "pre" else total, weight, 1e-6)
    expected = {"post": normed, "pre": normed + residual, "prenorm": (normed, total)}[style]
    torch.testing.assert_close(op(x, residual, weight, bias, p=0.3, style=style, seed=seed_of()), expected)
