from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops import residual_rms_norm
from fuselayers.ops.residual_rms_norm import residual_rms_norm_reference
from tests.ops import truth
from tests.ops.contract import CHECKS, DTYPES, SHAPES, assert_as_good_as, check_dynamic, check_fused, tensors


def op(x: Tensor, residual: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return residual_rms_norm(x, residual, weight=weight, **options)


def reference(x: Tensor, residual: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return residual_rms_norm_reference(x, residual, weight=weight, **options)


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return tensors(shape, shape, shape[-1:], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_as_good_as(op, reference, inputs_of(shape, dtype), eps=1e-2)


@pytest.mark.parametrize("check", CHECKS)
def test_contract(check: Any) -> None:
    check(op, reference, inputs_of((6, 9)), eps=1e-2)


def test_dynamic_shapes() -> None:
    check_dynamic(op, reference, inputs_of, eps=1e-2)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused(backend: str) -> None:
    check_fused(op, reference, inputs_of((6, 20)), backend=backend, eps=1e-5)


def test_is_its_formula() -> None:
    x, residual, weight = inputs_of((3, 21), torch.float64)
    expected = truth.rms_norm(x + residual, weight, 1e-6), x + residual
    torch.testing.assert_close(op(x, residual, weight), expected)


def test_errors() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"^residual must have x's shape \[3, 5\], got \[1, 5\]$"):
        residual_rms_norm(x, torch.ones(1, 5), weight=torch.ones(5))
    with pytest.raises(ValueError, match=r"^weight must be \[5\] to fit x \[3, 5\], got \[2\]$"):
        residual_rms_norm(x, x, weight=torch.ones(2))
    with pytest.raises(ValueError, match=r"^x must be \[..., N\], got a tensor without dimensions; give it one"):
        residual_rms_norm(x[0, 0], x[0, 0], weight=x[0, 0])
    with pytest.raises(TypeError, match=r"^weight must be a floating-point tensor, got NoneType$"):
        residual_rms_norm(x, x, weight=None)
