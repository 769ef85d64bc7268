import math

import pytest
import torch

from fuselayers.ops import ACTIVATIONS, activate

POINTS = [-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0]


def formula(name: str, z: float) -> float:
    """Each activation from its paper, in Python's own arithmetic."""
    normal = 0.5 * (1 + math.erf(z / math.sqrt(2)))
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    return {
        "relu": max(z, 0.0),
        "leaky_relu": z if z > 0 else 0.01 * z,
        "gelu": z * normal,
        "gelu_tanh": 0.5 * z * (1 + math.tanh(inner)),
        "silu": z / (1 + math.exp(-z)),
        "squared_relu": max(z, 0.0) ** 2,
        "star_relu": 0.8944 * max(z, 0.0) ** 2 - 0.4472,
        "smelu": 0.0 if z <= -2 else z if z >= 2 else (z + 2) ** 2 / 8,
    }[name]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_formula(name: str) -> None:
    got = activate(torch.tensor(POINTS, dtype=torch.float64), name)
    expected = torch.tensor([formula(name, z) for z in POINTS], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradcheck(name: str) -> None:
    z = torch.tensor([point + 0.1 for point in POINTS], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: activate(value, name), (z,))


def test_none_is_the_identity() -> None:
    z = torch.randn(3)
    assert activate(z, None) is z


def test_star_relu_has_zero_mean_and_unit_variance() -> None:
    y = activate(torch.randn(1_000_000, dtype=torch.float64), "star_relu")
    assert abs(y.mean().item()) < 0.01
    assert abs(y.var().item() - 1) < 0.02


def test_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^no activation 'gellu'; did you mean 'gelu'\? there are: gelu, gelu_tanh, "):
        activate(torch.ones(1), "gellu")
