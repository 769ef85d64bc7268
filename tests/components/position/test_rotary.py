import cmath

import pytest
import torch
from torch import Tensor

from fuselayers.components import RotaryPosition


def as_complex(x: Tensor) -> Tensor:
    """[..., C] -> [..., C / 2]: channel i is the real part and channel i + C / 2 the imaginary part."""
    first, second = x.double().chunk(2, dim=-1)
    return torch.complex(first, second)


def turned(x: Tensor, base: float) -> Tensor:
    """The reference: each pair of channels is a complex number, multiplied by exp(i t base^(-2 j / C))."""
    tokens, channels = x.shape[-2:]
    turns = [[cmath.exp(1j * t * base ** (-2 * j / channels)) for j in range(channels // 2)] for t in range(tokens)]
    product = as_complex(x) * torch.tensor(turns, dtype=torch.complex128)
    return torch.cat((product.real, product.imag), dim=-1)


@pytest.mark.parametrize(
    ("tokens", "channels", "base", "interleaved", "fraction", "width"),
    [
        (7, 20, 10000.0, True, 1.0, 20),
        (7, 20, 10000.0, False, 0.5, 10),
        (7, 20, 10000.0, True, 0.33, 6),
        (7, 20, 10000.0, False, 0.33, 6),
        (1, 2, 500.0, False, 1.0, 2),
        (129, 2, 10000.0, False, 1.0, 2),
        (129, 64, 500.0, False, 1.0, 64),
    ],
)
def test_it_multiplies_complex_numbers(
    tokens: int, channels: int, base: float, interleaved: bool, fraction: float, width: int
) -> None:
    q, k = torch.randn(2, 4, tokens, channels), torch.randn(2, 2, tokens, channels)
    position = RotaryPosition(base=base, interleaved=interleaved, fraction=fraction)
    order = torch.arange(width)
    # In interleaved pairs, the first half of `order` holds the places of the real parts.
    order = torch.cat((order[0::2], order[1::2])) if interleaved else order
    for got, x in zip(position.rotate(q, k), (q, k), strict=True):
        assert torch.equal(got[..., width:], x[..., width:])
        expected = turned(x[..., order], base)
        torch.testing.assert_close(got[..., order].double(), expected, rtol=1e-5, atol=1e-4 if tokens > 7 else 1e-5)


def test_errors() -> None:
    q = torch.zeros(1, 1, 2, 3)
    with pytest.raises(
        ValueError, match=r"^position 'rotary' needs an even number of channels per head, at least two, got 3$"
    ):
        RotaryPosition().rotate(q, q)
    with pytest.raises(ValueError, match=r"at least two, got 0 \(0.1 of 8\)$"):
        RotaryPosition(fraction=0.1).check_head_dim(8)
