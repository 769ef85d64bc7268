from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops import residual_layer_norm
from fuselayers.ops.residual_layer_norm import residual_layer_norm_reference
from fuselayers.partition import fuse
from tests.ops import truth
from tests.ops.contract import CHECKS, DTYPES, SHAPES, assert_as_good_as, check_dynamic, check_fused, tensors


def op(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return residual_layer_norm(x, residual, weight=weight, bias=bias, **options)


def reference(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return residual_layer_norm_reference(x, residual, weight=weight, bias=bias, **options)


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return tensors(shape, shape, shape[-1:], shape[-1:], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_as_good_as(op, reference, inputs_of(shape, dtype), eps=1e-2)


@pytest.mark.parametrize("check", CHECKS)
def test_contract(check: Callable[..., None]) -> None:
    check(op, reference, inputs_of((6, 9)), eps=1e-2)


def test_dynamic_shapes() -> None:
    check_dynamic(op, reference, inputs_of, eps=1e-2)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused(backend: str) -> None:
    check_fused(op, reference, inputs_of((6, 20)), backend=backend, eps=1e-5)


def test_gradcheck_of_the_reference() -> None:
    assert torch.autograd.gradcheck(reference, [value.double().requires_grad_() for value in inputs_of((3, 4))])


def test_is_its_formula() -> None:
    x, residual, weight, bias = inputs_of((3, 21), torch.float64)
    expected = truth.layer_norm(x + residual, weight, bias, 1e-5)
    torch.testing.assert_close(op(x, residual, weight, bias), (expected, x + residual))


@pytest.mark.parametrize(
    "form",
    [
        op,
        reference,
        pytest.param(torch.compile(op), id="inductor", marks=pytest.mark.slow),
        pytest.param(torch.compile(op, backend="aot_eager"), id="aot_eager"),
        pytest.param(fuse(op, backend="eager"), id="fuse"),
    ],
)
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_results_have_the_dtype_of_the_sum(form: Any, stream: torch.dtype, parameters: torch.dtype) -> None:
    x, residual, weight, bias = inputs_of((3, 21))
    y, total = form(x.bfloat16(), residual.to(stream), weight.to(parameters), bias.to(parameters))
    assert (y.dtype, total.dtype) == (stream, stream)


def test_second_output_is_the_sum() -> None:
    x, residual = torch.randn(4, 8), torch.randn(4, 8)
    assert torch.equal(residual_layer_norm(x, residual, weight=torch.ones(8))[1], x + residual)


def test_errors() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"^residual must have x's shape \[3, 5\], got \[1, 5\]$"):
        residual_layer_norm(x, torch.ones(1, 5), weight=torch.ones(5))
    with pytest.raises(ValueError, match=r"^weight must be \[5\] to fit x \[3, 5\], got \[2\]$"):
        residual_layer_norm(x, x, weight=torch.ones(2))
    with pytest.raises(ValueError, match=r"^bias must be \[5\] to fit x \[3, 5\], got \[2\]$"):
        residual_layer_norm(x, x, weight=torch.ones(5), bias=torch.ones(2))
    with pytest.raises(ValueError, match=r"^x must be \[..., N\], got a tensor without dimensions; give it one"):
        residual_layer_norm(x[0, 0], x[0, 0], weight=x[0, 0])
    with pytest.raises(TypeError, match=r"^weight must be a floating-point tensor, got NoneType$"):
        residual_layer_norm(x, x, weight=None)
