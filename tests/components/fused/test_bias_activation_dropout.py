import copy
import pickle
import re

import pytest
import torch

from fuselayers.components import FusedBiasActivationDropout
from fuselayers.ops import ACTIVATIONS, bias_activation_dropout, dropout
from tests.components.compare import assert_same_step, randomise, run


@pytest.mark.parametrize(
    ("backend", "bias_shape", "p"),
    [*((None, bias_shape, p) for bias_shape in (None, 7) for p in (0.0, 0.3)), ("eager", 7, 0.3)],
)
def test_training(backend: str | None, bias_shape: int | None, p: float) -> None:
    layer = randomise(FusedBiasActivationDropout(p, bias_shape, activation="gelu", backend=backend))
    reference = torch.nn.Module()
    reference.register_parameter("bias", layer.bias)
    reference.forward = lambda x: dropout(  # type: ignore[assignment]
        torch.nn.functional.gelu(x if layer.bias is None else x + layer.bias), p
    )
    assert_same_step(reference, layer, torch.randn(5, 3, 7))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_training_and_eval_have_the_same_activation(activation: str | None) -> None:
    layer = randomise(FusedBiasActivationDropout(0.0, 7, activation=activation, backend=None))
    x = torch.randn(5, 7)
    expected = bias_activation_dropout(x, layer.bias, activation=activation)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(layer.eval()(x), expected, rtol=0, atol=0)


def test_auto_is_the_default_and_eval_drops_nothing() -> None:
    assert FusedBiasActivationDropout(0.5, 7, activation="relu").backend == "auto"
    layer = FusedBiasActivationDropout(0.5, 7, activation="relu", backend=None)
    x = torch.randn(5, 7)
    torch.testing.assert_close(layer.eval()(x), torch.relu(x))


def test_the_bias_is_a_parameter_that_starts_at_zero_and_learns() -> None:
    layer = FusedBiasActivationDropout(0.1, 7, activation="gelu", backend=None)
    assert {name: value.tolist() for name, value in layer.state_dict().items()} == {"bias": [0.0] * 7}
    assert run(layer, [torch.randn(5, 7)])["gradient of bias"].abs().min() > 0
    assert not FusedBiasActivationDropout(0.1, backend=None).state_dict()


def test_copies() -> None:
    layer = randomise(FusedBiasActivationDropout(0.3, 7, activation="relu", backend="eager"))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_step(layer, other, torch.randn(2, 7))
        assert other.bias is not layer.bias


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"p": 1.5}, "p must be at least 0 and below 1, got 1.5"),
        ({"p": 0.1, "bias_shape": 0}, "bias_shape must be at least 1, got 0"),
        ({"p": 0.1, "activation": "glue"}, "no activation 'glue'; did you mean 'gelu'?"),
        ({"p": 0.1, "backend": "inducter"}, "no backend 'inducter'; did you mean 'inductor'"),
    ],
)
def test_errors(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        FusedBiasActivationDropout(**arguments)  # type: ignore[arg-type]


def test_a_bias_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^bias must be \[5\] to fit x \[3, 5\], got \[4\]$"):
        FusedBiasActivationDropout(0.1, 4, backend=None)(torch.zeros(3, 5))
