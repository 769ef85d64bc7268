import pytest
import torch

from fuselayers.ops import rotary


def angles(tokens: int, channels: int) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    return torch.arange(tokens, dtype=torch.float64)[:, None] * frequency


def test_is_a_complex_rotation() -> None:
    q = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    k = torch.randn(2, 1, 5, 8, dtype=torch.float64)
    angle = angles(5, 8)
    for got, x in zip(rotary(q, k, angle.cos(), angle.sin()), (q, k), strict=True):
        turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1))


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    angle = angles(12, 8)
    turned_q, turned_k = rotary(q.expand(1, 1, 12, 8), k.expand(1, 1, 12, 8), angle.cos(), angle.sin())
    scores = (turned_q @ turned_k.mT)[0, 0]
    for distance in range(-3, 4):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_keeps_the_dtype_and_rotates_in_float32() -> None:
    q = torch.randn(1, 2, 5, 8).bfloat16()
    angle = angles(5, 8).float()
    got, _ = rotary(q, q, angle.cos(), angle.sin())
    exact, _ = rotary(q.double(), q.double(), angle.double().cos(), angle.double().sin())
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_gradcheck() -> None:
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    angle = angles(3, 4)
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, angle.cos(), angle.sin()), (q, k))


def test_errors() -> None:
    q = torch.ones(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"^rotary needs an even number of channels per head, got 3$"):
        rotary(q[..., :3], q[..., :3], torch.ones(3, 1), torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"^k must end in \[3, 4\] to fit q \[1, 1, 3, 4\], got \[1, 1, 2, 4\]$"):
        rotary(q, q[:, :, :2], torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"^cos must be \[3, 2\] to fit q \[1, 1, 3, 4\], got \[3, 4\]$"):
        rotary(q, q, torch.ones(3, 4), torch.ones(3, 2))
