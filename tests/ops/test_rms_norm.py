import torch

from fuselayers.ops import rms_norm
from tests.ops import truth
from tests.ops.contract import tensors


def test_is_its_formula() -> None:
    x, weight = tensors((3, 21), (21,), dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight=weight), truth.rms_norm(x, weight, 1e-6))
