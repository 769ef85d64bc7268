import math

import pytest
import torch
from torch import Tensor

from fuselayers.components import SinusoidalPosition
from tests.components.compare import run


def written_out(x: Tensor, *, base: float = 10000.0, first: int = 0) -> Tensor:
    """The table of section 3.5, entry by entry in Python's floats."""
    tokens, hidden_dim = x.shape[-2:]
    table = torch.empty(tokens, hidden_dim, dtype=torch.float64)
    for row in range(tokens):
        for channel in range(hidden_dim):
            angle = (first + row) / base ** (channel // 2 * 2 / hidden_dim)
            table[row, channel] = math.cos(angle) if channel % 2 else math.sin(angle)
    return x + table


@pytest.mark.parametrize(
    ("base", "hidden_dim", "tokens", "first"),
    [(10000.0, 1, 129, 0), (10000.0, 2, 1, 40), (50.0, 7, 129, 40), (10000.0, 16, 129, 0), (50.0, 16, 1, 40)],
)
def test_it_is_the_papers_table(base: float, hidden_dim: int, tokens: int, first: int) -> None:
    x = torch.randn(2, tokens, hidden_dim).double()
    position = SinusoidalPosition(base=base)
    got = run(lambda x: position(x, first=first), [x])
    expected = run(lambda x: written_out(x, base=base, first=first), [x])
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=2e-5)  # the angles are float32
