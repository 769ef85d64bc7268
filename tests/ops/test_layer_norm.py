import torch

from fuselayers.ops import layer_norm
from tests.ops import truth
from tests.ops.contract import tensors


def test_is_its_formula() -> None:
    x, weight, bias = tensors((3, 21), (21,), (21,), dtype=torch.float64)
    torch.testing.assert_close(layer_norm(x, weight=weight, bias=bias), truth.layer_norm(x, weight, bias, 1e-5))
    torch.testing.assert_close(layer_norm(x, weight=weight), truth.layer_norm(x, weight, torch.zeros(21), 1e-5))
