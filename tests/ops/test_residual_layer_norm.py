from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops import residual_layer_norm
from fuselayers.partition import fuse
from tests.ops import truth
from tests.ops.contract import tensors


def op(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return residual_layer_norm(x, residual, weight=weight, bias=bias)


def test_is_its_formula() -> None:
    x, residual, weight, bias = tensors((3, 21), (3, 21), (21,), (21,), dtype=torch.float64)
    expected = truth.layer_norm(x + residual, weight, bias, 1e-5)
    torch.testing.assert_close(op(x, residual, weight, bias), (expected, x + residual))


# Each form decides the results' dtypes in separate code: the op, two tracers, and the fusion core.
@pytest.mark.parametrize(
    "form",
    [
        op,
        pytest.param(torch.compile(op), id="inductor", marks=pytest.mark.slow),
        pytest.param(torch.compile(op, backend="aot_eager"), id="aot_eager"),
        pytest.param(fuse(op, backend="eager"), id="fuse"),
    ],
)
@pytest.mark.parametrize(
    ("stream", "parameters"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
def test_results_have_the_dtype_of_the_sum(form: Any, stream: torch.dtype, parameters: torch.dtype) -> None:
    x, residual, weight, bias = tensors((3, 21), (3, 21), (21,), (21,))
    y, total = form(x.bfloat16(), residual.to(stream), weight.to(parameters), bias.to(parameters))
    assert (y.dtype, total.dtype) == (stream, stream)
