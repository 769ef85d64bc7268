import pytest
import torch

from fuselayers.ops import bias_dropout_residual
from fuselayers.partition import saved_bytes
from tests.ops import truth
from tests.ops.contract import seed_of, tensors


def test_is_its_formula() -> None:
    x, residual, bias = tensors((3, 21), (3, 21), (21,), dtype=torch.float64)
    expected = (x + bias) * truth.dropout_factor(seed_of(), x.shape, 0.3) + residual
    torch.testing.assert_close(bias_dropout_residual(x, residual, bias=bias, p=0.3, seed=seed_of()), expected)


def test_backward_saves_a_seed_only() -> None:
    x, residual = torch.randn(64, 128, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    assert saved_bytes(lambda x, residual: bias_dropout_residual(x, residual, p=0.1), x, residual) == 8


def test_errors() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"^residual must have x's shape \[3, 5\], got \[5\]$"):
        bias_dropout_residual(x, torch.ones(5))
    with pytest.raises(ValueError, match=r"^bias must be \[5\] to fit x \[3, 5\], got \[1\]$"):
        bias_dropout_residual(x, x, bias=torch.ones(1))
    with pytest.raises(ValueError, match=r"^residual must be on x's device cpu, got meta"):
        bias_dropout_residual(x, torch.ones(3, 5, device="meta"))
