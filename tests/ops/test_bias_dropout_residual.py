from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops import bias_dropout_residual
from fuselayers.ops.bias_dropout_residual import bias_dropout_residual_reference
from fuselayers.partition import saved_bytes
from tests.ops import truth
from tests.ops.contract import CHECKS, DTYPES, SHAPES, assert_as_good_as, check_dynamic, check_fused, seed_of, tensors


def op(x: Tensor, residual: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return bias_dropout_residual(x, residual, bias=bias, **options)


def reference(x: Tensor, residual: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return bias_dropout_residual_reference(x, residual, bias=bias, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_as_good_as(op, reference, tensors(shape, shape, shape[-1:], dtype=dtype), p=0.3, seed=seed_of())


@pytest.mark.parametrize("check", CHECKS)
def test_contract(check: Callable[..., None]) -> None:
    check(op, reference, tensors((6, 9), (6, 9), (9,)), p=0.3, seed=seed_of())


def test_dynamic_shapes() -> None:
    check_dynamic(op, reference, lambda shape: tensors(shape, shape, shape[1:]), p=0.3, seed=seed_of())


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused(backend: str) -> None:
    check_fused(op, reference, tensors((6, 20), (6, 20), (20,)), backend=backend, p=0.3, seed=seed_of())


def test_gradcheck_of_the_reference() -> None:
    inputs = [value.double().requires_grad_() for value in tensors((3, 4), (3, 4), (4,))]
    assert torch.autograd.gradcheck(lambda *args: reference(*args, p=0.3, seed=seed_of()), inputs)


def test_is_its_formula() -> None:
    x, residual, bias = tensors((3, 21), (3, 21), (21,), dtype=torch.float64)
    expected = (x + bias) * truth.dropout_factor(seed_of(), x.shape, 0.3) + residual
    torch.testing.assert_close(op(x, residual, bias, p=0.3, seed=seed_of()), expected)


def test_eval_and_zero_probability_are_exact() -> None:
    x, residual, bias = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    expected = x + bias + residual
    assert torch.equal(bias_dropout_residual(x, residual, bias=bias, p=0.9, training=False), expected)
    assert torch.equal(bias_dropout_residual(x, residual, bias=bias), expected)
    assert torch.equal(bias_dropout_residual(x, residual), x + residual)


def test_backward_keeps_a_seed_only() -> None:
    x, residual = torch.randn(64, 128, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    assert saved_bytes(lambda x, residual: bias_dropout_residual(x, residual, p=0.1), x, residual) == 8


def test_errors() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"^residual must have x's shape \[3, 5\], got \[5\]$"):
        bias_dropout_residual(x, torch.ones(5))
    with pytest.raises(ValueError, match=r"^bias must be \[5\] to fit x \[3, 5\], got \[1\]$"):
        bias_dropout_residual(x, x, bias=torch.ones(1))
    with pytest.raises(ValueError, match=r"^dropout probability p must satisfy 0 <= p < 1, got -1$"):
        bias_dropout_residual(x, x, p=-1)
    with pytest.raises(ValueError, match=r"^residual must be on x's device cpu, got meta"):
        bias_dropout_residual(x, torch.ones(3, 5, device="meta"))
    with pytest.raises(ValueError, match=r"^x must be \[..., N\], got a tensor without dimensions; give it one"):
        bias_dropout_residual(torch.tensor(3.0), torch.tensor(3.0))
    with pytest.raises(TypeError, match=r"^residual must be a floating-point tensor, got torch.int64; convert it, for"):
        bias_dropout_residual(x, torch.ones(3, 5, dtype=torch.int64))
