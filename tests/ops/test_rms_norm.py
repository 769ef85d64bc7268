import pytest
import torch

from fuselayers.ops import rms_norm
from tests.ops import truth
from tests.ops.contract import tensors


def test_is_its_formula() -> None:
    x, weight = tensors((3, 21), (21,), dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight=weight), truth.rms_norm(x, weight, 1e-6))


def test_errors() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"^weight must be \[5\] to fit x \[3, 5\], got \[2\]$"):
        rms_norm(x, weight=torch.ones(2))
    with pytest.raises(ValueError, match=r"^x must be \[..., N\], got a tensor without dimensions; give it one"):
        rms_norm(x[0, 0], weight=x[0, 0])
    with pytest.raises(TypeError, match=r"^weight must be a floating-point tensor, got NoneType$"):
        rms_norm(x, weight=None)
