import pytest
import torch

from fuselayers.ops import ACTIVATIONS, activate
from tests.ops import truth

POINTS = [-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_formula(name: str) -> None:
    got = activate(torch.tensor(POINTS, dtype=torch.float64), name)
    expected = torch.tensor([truth.activation(name, z) for z in POINTS], dtype=torch.float64)
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


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^activation must be a name or None, got a list$"):
        activate(torch.ones(1), ["relu"])
    with pytest.raises(TypeError, match=r"^z must be a floating-point tensor, got torch.int64; convert it"):
        activate(torch.arange(-3, 4), "star_relu")
