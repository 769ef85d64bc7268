import functools

import pytest
import torch
from torch import Tensor

from fuselayers.components.attention.kernel_sums import Features, kernel_attention
from tests.components.compare import assert_same_step


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 129, 193])
@pytest.mark.parametrize("groups", [6, 2, 1])
def test_causal_sums_over_chunks_are_running_sums(groups: int, tokens: int) -> None:
    q = torch.rand(2, 6, tokens, 3, dtype=torch.float64)
    k, v = torch.rand(2, 2, groups, tokens, 3, dtype=torch.float64)
    got = kernel_attention(q, k, v, lambda q, k: (q, k, None), causal=True)
    of_query = [h * groups // 6 for h in range(6)]
    states = (k[..., None] * v[..., None, :]).cumsum(2)[:, of_query]
    totals = k.cumsum(2)[:, of_query]
    expected = (q[..., None] * states).sum(-2) / (q * totals).sum(-1, keepdim=True)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_sums_are_float32_under_autocast() -> None:
    # bfloat16 has eight bits: above 256 it holds not every whole number, and so not these sums.
    ones = torch.ones(1, 1, 1024, 1)
    values = torch.arange(1024.0).view(1, 1, 1024, 1)
    with torch.autocast("cpu", torch.bfloat16):
        got = kernel_attention(ones, ones, values, lambda q, k: (q, k, None), causal=True)
    torch.testing.assert_close(got, values / 2, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 64, 65, 129, 700])
@pytest.mark.parametrize("groups", [6, 2])
def test_levels_are_factors_that_cancel(groups: int, tokens: int) -> None:
    q = torch.rand(2, 6, tokens, 3, dtype=torch.float64)
    k, v = torch.rand(2, 2, groups, tokens, 3, dtype=torch.float64)
    level = torch.rand(2, groups, tokens, 1, dtype=torch.float64).cumsum(2) * 30 / tokens - 3

    def step(features: Features, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel_attention(q, k, v, features, causal=True)

    without = functools.partial(step, lambda q, k: (q, k, None))
    leveled = functools.partial(step, lambda q, k: (q, k / level.exp(), level))
    assert_same_step(without, leveled, q, k, v, rtol=1e-9, atol=1e-9)
