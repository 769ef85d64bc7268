import re

import pytest
import torch
from torch import Tensor, nn

from fuselayers import ops
from fuselayers.components import MLP
from fuselayers.testing import check_recompute


class Counting(nn.Module):
    """Gives another value at each call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_the_first_layer_that_differs_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.5), Counting()), nn.Linear(3, 3))
    with pytest.raises(AssertionError, match=f"^{re.escape('1.1 gives another result 0 in the second forward')}$"):
        check_recompute(model, torch.ones(4, 3))
    with pytest.raises(AssertionError, match=r"^1\.0 gives"):
        check_recompute(model, torch.ones(64, 3), preserve_rng_state=False)


def test_masks_of_seeds_need_no_state() -> None:
    model = nn.Sequential(MLP(8, dropout=0.5), MLP(8, dropout=0.5))
    x = torch.ones(16, 8)
    check_recompute(model, x)
    with pytest.raises(AssertionError, match=r"^0\.down gives another result 0"):
        check_recompute(model, x, preserve_rng_state=False)
    with ops.seeds(model, 7, step=3):
        check_recompute(model, x, preserve_rng_state=False)


def test_other_layers_in_the_second_forward() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.skips = nn.Linear(2, 2), False

        def forward(self, x: Tensor) -> Tensor:
            skips, self.skips = self.skips, True
            return x if skips else self.layer(x)

    with pytest.raises(AssertionError, match=re.escape("the second forward calls [''], the first ['layer', '']")):
        check_recompute(Skipping(), torch.ones(1, 2))
