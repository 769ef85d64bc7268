import math

import pytest
import torch
from torch import Tensor

from fuselayers.components import ALiBiPosition


def slopes(num_heads: int) -> list[float]:
    """As in the authors' released code, `get_slopes`."""

    def of_a_power(heads: int) -> list[float]:
        start = 2 ** -(2 ** -(math.log2(heads) - 3))
        return [start * start**place for place in range(heads)]

    if math.log2(num_heads).is_integer():
        return of_a_power(num_heads)
    closest = 2 ** math.floor(math.log2(num_heads))
    return of_a_power(closest) + slopes(2 * closest)[0::2][: num_heads - closest]


def written_out(num_heads: int, tokens: int, first: int) -> Tensor:
    rows = [
        [[-slope * abs(first + row - key) for key in range(first + tokens)] for row in range(tokens)]
        for slope in slopes(num_heads)
    ]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("num_heads", "tokens", "first"),
    [*((num_heads, 3, 5) for num_heads in (1, 2, 3, 6, 8, 12, 25, 64, 71)), (6, 1, 0), (6, 7, 0), (6, 1, 5)],
)
def test_it_is_the_authors_bias(num_heads: int, tokens: int, first: int) -> None:
    got = ALiBiPosition(num_heads=num_heads).bias(torch.zeros(2, tokens, 4, dtype=torch.float64), first=first)
    torch.testing.assert_close(got, written_out(num_heads, tokens, first), rtol=1e-6, atol=1e-7)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^num_heads must be at least 1, got 0$"):
        ALiBiPosition(num_heads=0)
