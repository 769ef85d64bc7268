import pytest
import torch

from fuselayers.ops import draw_seed, keep_mask
from fuselayers.partition import passes


@pytest.mark.parametrize("shape", [(), (7,), (1, 1), (3, 129), (2, 3, 5), (0, 4)], ids=str)
def test_is_the_mask_of_philox(shape: tuple[int, ...]) -> None:
    seed = torch.tensor(1234)
    got = torch.ops.fuselayers.keep_mask(seed, shape, 0.3)
    assert torch.equal(got, keep_mask(seed, shape, p=0.3))
    assert got.is_contiguous()


def test_is_known_to_torch() -> None:
    results = torch.library.opcheck(torch.ops.fuselayers.keep_mask.default, (torch.tensor(7), [4, 10], 0.5))
    assert set(results.values()) == {"SUCCESS"}


def test_is_what_the_fusion_core_was_handed() -> None:
    (ops,) = passes.seeded_dropout._provided  # type: ignore[attr-defined]
    assert ops.mask is torch.ops.fuselayers.keep_mask.default
    x = torch.randn(6, 10)
    torch.manual_seed(1)
    out = ops.dropout(x, 0.25)
    torch.manual_seed(1)
    kept = keep_mask(draw_seed(), x.shape, p=0.25)
    torch.testing.assert_close(out, x * kept * ops.scale(0.25))
