import pytest
import torch

from fuselayers.ops import ACTIVATIONS, bias_activation_dropout
from fuselayers.partition import fuse, saved_bytes
from tests.ops import truth
from tests.ops.contract import seed_of, tensors


@pytest.mark.parametrize(
    ("activation", "backend"),
    [
        ("gelu", "eager"),
        (None, "eager"),
        *(pytest.param(activation, "inductor", marks=pytest.mark.slow) for activation in ("gelu", "smelu", None)),
    ],
)
def test_fused_backward_saves_one_tensor_at_most(activation: str | None, backend: str) -> None:
    x, bias = torch.randn(64, 128, requires_grad=True), torch.randn(128, requires_grad=True)

    def call(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return bias_activation_dropout(x, bias, activation=activation, p=0.1)

    fused = fuse(call, backend=backend, fallback=())
    assert saved_bytes(fused, x, bias, parameters=(bias,)) == (activation is not None) * x.numel() * 4 + 8


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_its_formula(activation: str) -> None:
    x, bias = tensors((3, 21), (21,), dtype=torch.float64)
    expected = truth.activated(activation, x + bias) * truth.dropout_factor(seed_of(), x.shape, 0.3)
    got = bias_activation_dropout(x, bias, activation=activation, p=0.3, seed=seed_of())
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
