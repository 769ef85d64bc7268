import torch

from fuselayers.ops import bias_dropout_residual
from tests.ops import truth
from tests.ops.contract import seed_of, tensors


def test_is_its_formula() -> None:
    x, residual, bias = tensors((3, 21), (3, 21), (21,), dtype=torch.float64)
    expected = (x + bias) * truth.dropout_factor(seed_of(), x.shape, 0.3) + residual
    torch.testing.assert_close(bias_dropout_residual(x, residual, bias=bias, p=0.3, seed=seed_of()), expected)
