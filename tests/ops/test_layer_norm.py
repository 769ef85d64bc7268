import pytest
import torch

from fuselayers.ops import layer_norm
from tests.ops import truth
from tests.ops.contract import tensors


def test_is_its_formula() -> None:
    x, weight, bias = tensors((3, 21), (21,), (21,), dtype=torch.float64)
    torch.testing.assert_close(layer_norm(x, weight=weight, bias=bias), truth.layer_norm(x, weight, bias, 1e-5))
    torch.testing.assert_close(layer_norm(x, weight=weight), truth.layer_norm(x, weight, torch.zeros(21), 1e-5))


def test_errors() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"^weight must be \[5\] to fit x \[3, 5\], got \[2\]$"):
        layer_norm(x, weight=torch.ones(2))
    with pytest.raises(ValueError, match=r"^bias must be \[5\] to fit x \[3, 5\], got \[2\]$"):
        layer_norm(x, weight=torch.ones(5), bias=torch.ones(2))
    with pytest.raises(ValueError, match=r"^x must be \[..., N\], got a tensor without dimensions; give it one"):
        layer_norm(x[0, 0], weight=x[0, 0])
    with pytest.raises(TypeError, match=r"^weight must be a floating-point tensor, got NoneType$"):
        layer_norm(x, weight=None)
