import pytest
import torch

from fuselayers.ops import bias_dropout_residual_rms_norm
from tests.ops import truth
from tests.ops.contract import seed_of, tensors


@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
def test_is_its_formula(style: str) -> None:
    x, residual, weight, bias = tensors((3, 21), (3, 21), (21,), (21,), dtype=torch.float64)
    dropped = (x + bias) * truth.dropout_factor(seed_of(), x.shape, 0.3)
    total = dropped + residual
    normed = truth.rms_norm(dropped if style == "pre" else total, weight, 1e-6)
    expected = {"post": normed, "pre": normed + residual, "prenorm": (normed, total)}[style]
    got = bias_dropout_residual_rms_norm(x, residual, weight=weight, bias=bias, p=0.3, style=style, seed=seed_of())
    torch.testing.assert_close(got, expected)
