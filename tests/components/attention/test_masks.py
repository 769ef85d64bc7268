import re

import pytest
import torch
from torch import Tensor

from fuselayers.components import block_mask


@pytest.mark.parametrize(("shape", "block_size"), [((3, 3), 1), ((2, 3, 3), 4)])
def test_a_layout_of_blocks(shape: tuple[int, ...], block_size: int) -> None:
    layout = torch.rand(shape) < 0.5
    mask = block_mask(layout, block_size)
    blocks = torch.ones(block_size, block_size, dtype=torch.int32)
    assert torch.equal(mask, torch.kron(layout.int(), blocks).bool())


@pytest.mark.parametrize(
    ("layout", "block_size", "text"),
    [
        (torch.ones(2, 2), 1, "layout must be torch.bool [N, N] or [H, N, N], got torch.float32 [2, 2]"),
        (torch.ones(2, 3, dtype=torch.bool), 1, "layout must be torch.bool [N, N] or [H, N, N], got torch.bool [2, 3]"),
        (torch.ones(2, dtype=torch.bool), 1, "layout must be torch.bool [N, N] or [H, N, N], got torch.bool [2]"),
        (torch.ones(2, 2, dtype=torch.bool), 0, "block_size must be at least 1, got 0"),
    ],
)
def test_errors_of_a_layout(layout: Tensor, block_size: int, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        block_mask(layout, block_size)
