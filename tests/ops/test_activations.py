import re

import pytest
import torch

from fuselayers.ops import ACTIVATIONS, activate, bias_activation_dropout, check_activation
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


def test_the_slope_of_smelu_where_its_pieces_meet() -> None:
    z = torch.tensor([-2.0, 2.0], requires_grad=True)
    activate(z, "smelu").sum().backward()
    assert z.grad.tolist() == [0.0, 1.0]


def test_none_is_the_identity() -> None:
    z = torch.randn(3)
    assert activate(z, None) is z


def test_what_is_no_name_is_refused() -> None:
    advice = re.escape("got a Mish; register its class with components.register('activation', NAME) and pass the name")
    with pytest.raises(TypeError, match=f"^activation must be a string or None, {advice}$"):
        check_activation(torch.nn.Mish())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^activation must be a string or None, got a list$"):
        activate(torch.ones(1), ["relu"])


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_of_the_kernels(dtype: torch.dtype) -> None:
    """16 bits hide the error of its polynomial. The slope has a root, so its bound is partly absolute."""
    z = torch.linspace(-8, 8, 4096).to(dtype).requires_grad_()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    y = bias_activation_dropout(z.to(device), activation="gelu", backend="triton")
    (slope,) = torch.autograd.grad(y.sum(), z)
    wide = z.detach().double().requires_grad_()
    exact = activate(wide, "gelu")
    (exact_slope,) = torch.autograd.grad(exact.sum(), wide)
    half = torch.finfo(dtype).eps / 2
    for got, expected, slack in ((y.cpu(), exact, 1e-7), (slope, exact_slope, 1e-5)):
        error = (got.double() - expected).abs()
        assert bool((error <= 1.02 * half * expected.abs() + slack).all()), error.max()
