import pytest
import torch

from fuselayers.ops import draw_seed, keep_mask


def test_a_draw_takes_one_number_from_the_generator() -> None:
    torch.manual_seed(0)
    expected = torch.randint(-(1 << 63), (1 << 63) - 1, (2,))
    torch.manual_seed(0)
    assert [draw_seed(), draw_seed()] == expected.tolist()


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition", "inductor"])
def test_plain_torch_compile_does_not_merge_two_draws(backend: str) -> None:
    def two_masks(x: torch.Tensor) -> torch.Tensor:
        first = keep_mask(draw_seed(device=x.device), x.shape, p=0.5)
        return (x * first * keep_mask(draw_seed(device=x.device), x.shape, p=0.5)).cos()

    x = torch.ones(16, 64, requires_grad=True)
    torch.manual_seed(1)
    expected = two_masks(x)
    torch.manual_seed(1)
    torch.testing.assert_close(torch.compile(two_masks, backend=backend)(x), expected)
    assert 0.15 < (expected != 1).double().mean() < 0.35  # a quarter survives two masks, a half would survive one


def test_torch_accepts_the_drawing_op() -> None:
    fresh = torch.empty((), dtype=torch.int64)
    tests = ("test_schema", "test_faketensor")  # nothing to differentiate, and no two draws agree
    torch.library.opcheck(
        torch.ops.fuselayers.draw_seed.default, (fresh,), {"device": torch.device("cpu")}, test_utils=tests
    )
