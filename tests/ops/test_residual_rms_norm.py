import torch

from fuselayers.ops import residual_rms_norm
from tests.ops import truth
from tests.ops.contract import tensors


def test_is_its_formula() -> None:
    x, residual, weight = tensors((3, 21), (3, 21), (21,), dtype=torch.float64)
    expected = truth.rms_norm(x + residual, weight, 1e-6), x + residual
    torch.testing.assert_close(residual_rms_norm(x, residual, weight=weight), expected)
