import copy
import pickle
import re

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import FusedBiasDropoutResidual
from fuselayers.ops import dropout
from tests.components.compare import assert_same_step, randomise


class WrittenOut(nn.Module):
    def __init__(self, layer: FusedBiasDropoutResidual) -> None:
        super().__init__()
        self.bias, self.p = layer.bias, layer.p

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return dropout(x if self.bias is None else x + self.bias, self.p, training=self.training) + residual


@pytest.mark.parametrize(
    ("backend", "bias_shape", "p"),
    [*((None, bias_shape, p) for bias_shape in (None, 7) for p in (0.0, 0.3)), ("eager", 7, 0.3)],
)
def test_training_and_eval(backend: str | None, bias_shape: int | None, p: float) -> None:
    layer = randomise(FusedBiasDropoutResidual(p, bias_shape, backend=backend))
    x, residual = torch.randn(5, 3, 7), torch.randn(5, 3, 7)
    assert_same_step(WrittenOut(layer), layer, x, residual)
    torch.testing.assert_close(layer.eval()(x, residual), (x if layer.bias is None else x + layer.bias) + residual)


def test_x_and_the_residual_may_be_the_same_tensor() -> None:
    layer = FusedBiasDropoutResidual(0.0, backend="eager")
    x = torch.randn(3, 7, requires_grad=True)
    layer(x, x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def test_state_dict_and_copies() -> None:
    layer = randomise(FusedBiasDropoutResidual(0.3, 7, backend="eager"))
    assert list(layer.state_dict()) == ["bias"]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_step(layer, other, torch.randn(2, 7), torch.randn(2, 7))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"p": -0.1}, "p must be at least 0 and below 1, got -0.1"),
        ({"p": 0.1, "bias_shape": -1}, "bias_shape must be at least 1, got -1"),
        ({"p": 0.1, "partition": "mincut"}, "no partition"),
    ],
)
def test_errors(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        FusedBiasDropoutResidual(**arguments)  # type: ignore[arg-type]


def test_a_residual_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^residual must have x's shape \[3, 5\], got \[5\]"):
        FusedBiasDropoutResidual(0.1, backend=None)(torch.zeros(3, 5), torch.zeros(5))
