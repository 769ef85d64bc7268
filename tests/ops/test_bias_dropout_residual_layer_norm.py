import pytest
import torch
from torch import Tensor

from fuselayers.ops import bias_dropout_residual_layer_norm
from fuselayers.partition import saved_bytes
from tests.ops import truth
from tests.ops.contract import seed_of, tensors


@pytest.mark.parametrize("style", ["post", "pre", "prenorm"])
def test_is_its_formula(style: str) -> None:
    x, residual, weight, norm_bias, bias = tensors((3, 21), (3, 21), (21,), (21,), (21,), dtype=torch.float64)
    dropped = (x + bias) * truth.dropout_factor(seed_of(), x.shape, 0.3)
    total = dropped + residual
    normed = truth.layer_norm(dropped if style == "pre" else total, weight, norm_bias, 1e-5)
    expected = {"post": normed, "pre": normed + residual, "prenorm": (normed, total)}[style]
    got = bias_dropout_residual_layer_norm(
        x, residual, weight=weight, norm_bias=norm_bias, bias=bias, p=0.3, style=style, seed=seed_of()
    )
    torch.testing.assert_close(got, expected)


def test_backward_saves_the_sum_its_statistics_and_a_seed() -> None:
    x, residual = torch.randn(64, 128, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    weight = torch.ones(128, requires_grad=True)

    def call(x: Tensor, residual: Tensor) -> Tensor:
        return bias_dropout_residual_layer_norm(x, residual, weight=weight, p=0.1)

    assert saved_bytes(call, x, residual, parameters=(weight,)) == x.numel() * 4 + 64 * 2 * 4 + 8
