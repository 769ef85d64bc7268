from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops import rms_norm
from fuselayers.ops.rms_norm import rms_norm_reference
from tests.ops import truth
from tests.ops.contract import CHECKS, DTYPES, SHAPES, assert_as_good_as, check_dynamic, check_fused, tensors


def op(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return rms_norm(x, weight=weight, **options)


def reference(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return rms_norm_reference(x, weight=weight, **options)


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return tensors(shape, shape[-1:], dtype=dtype)


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
    x, weight = inputs_of((3, 21), torch.float64)
    torch.testing.assert_close(op(x, weight), truth.rms_norm(x, weight, 1e-6))


def test_errors() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"^weight must be \[5\] to fit x \[3, 5\], got \[2\]$"):
        rms_norm(x, weight=torch.ones(2))
    with pytest.raises(ValueError, match=r"^x must be \[..., N\], got a tensor without dimensions; give it one"):
        rms_norm(x[0, 0], weight=x[0, 0])
    with pytest.raises(TypeError, match=r"^weight must be a floating-point tensor, got NoneType$"):
        rms_norm(x, weight=None)
