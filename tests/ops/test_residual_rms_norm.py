import pytest
import torch

from fuselayers.ops import residual_rms_norm
from tests.ops import truth
from tests.ops.contract import tensors


def test_is_its_formula() -> None:
    x, residual, weight = tensors((3, 21), (3, 21), (21,), dtype=torch.float64)
    expected = truth.rms_norm(x + residual, weight, 1e-6), x + residual
    torch.testing.assert_close(residual_rms_norm(x, residual, weight=weight), expected)


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
