import math

import pytest
import torch

from fuselayers.components.attention.kernels import attend
from fuselayers.components.attention.masks import Rules
from fuselayers.ops import dropout
from tests.components.attention.contract import weights_of
from tests.components.compare import assert_same_step


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("groups", [6, 2])
def test_values_and_gradients_with_keys_of_their_own_number(groups: int, masked: bool, p: float) -> None:
    q = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, groups, 7, 4, dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 7) > 0.4
    mask[0, 0, 3] = False  # a query with nothing to look at
    mask = mask if masked else torch.ones_like(mask)

    def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        of_query = [h * groups // 6 for h in range(6)]
        scores = q @ k[:, of_query].mT / math.sqrt(4)
        scores = torch.where(mask.any(-1, keepdim=True), scores, 0 * scores.detach())
        shares = torch.where(mask.any(-1, keepdim=True), weights_of(scores, mask | ~mask.any(-1, keepdim=True)), 0)
        return dropout(shares, p) @ v[:, of_query]

    def got(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, Rules(scale=1 / math.sqrt(4), mask=mask if masked else None), p=p)

    assert_same_step(written_out, got, q, k, v, rtol=1e-9, atol=1e-9)
