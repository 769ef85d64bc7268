import pytest
import torch
from torch import Tensor

from fuselayers.ops.residual_layer_norm import residual_layer_norm_reference
from fuselayers.testing import DTYPES, assert_as_good_as, results, samples


def reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return residual_layer_norm_reference(x, residual, weight=weight, eps=1e-2)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 129)])
def test_statistics_in_bfloat16_are_seen(shape: tuple[int, ...]) -> None:
    def sloppy(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        centred = total - total.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight, total

    inputs = samples(shape, shape, shape[-1:], dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="allowed"):
        assert_as_good_as(sloppy, reference, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_way_to_compute_the_same_is_good_enough(dtype: torch.dtype) -> None:
    def by_torch(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return torch.nn.functional.layer_norm(total, total.shape[-1:], weight, None, 1e-2), total

    assert_as_good_as(by_torch, reference, samples((7, 33), (7, 33), (33,), dtype=dtype))


def test_one_wrong_gradient_among_many_values_is_seen() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, dy: Tensor) -> Tensor:
            dx = dy * 2
            dx[3, 5] += 1e-3
            return dx

    inputs = samples((64, 64))
    assert_as_good_as(lambda x: x + x, lambda x: x * 2, inputs)
    with pytest.raises(AssertionError, match=r"^d0: error 0\.001, allowed"):
        assert_as_good_as(Wrong.apply, lambda x: x * 2, inputs)


def test_what_differs_is_named() -> None:
    x = samples((3, 5))
    with pytest.raises(AssertionError, match=r"^y0: wanted torch.float32, got torch.float64$"):
        assert_as_good_as(lambda x: x.double(), lambda x: x * 1, x)
    with pytest.raises(AssertionError, match=r"^y0: wanted \[3, 5\], got \[5, 3\]$"):
        assert_as_good_as(lambda x: x.mT, lambda x: x * 1, x)
    with pytest.raises(AssertionError, match=r"^wanted y0, d0, got y0, y1, d0$"):
        assert_as_good_as(lambda x: (x * 1, x * 2), lambda x: x * 1, x)
    with pytest.raises(AssertionError, match=r"^d0: error 2, allowed"):
        assert_as_good_as(lambda x: x.detach() * 2, lambda x: x * 2, x)


def test_what_is_not_floating_has_no_gradient() -> None:
    place, table = torch.tensor([2, 0, 2]), samples((4, 3))[0]
    found = results(torch.nn.functional.embedding, [place, table])
    assert list(found) == ["y0", "d1"]
    assert torch.equal(found["y0"], table[place])
    assert_as_good_as(lambda place, table: table[place], torch.nn.functional.embedding, [place, table])


def test_samples_are_exact_in_every_dtype() -> None:
    (x,) = samples((50, 50), dtype=torch.float64)
    assert x.unique().numel() > 200
    for dtype in DTYPES:
        assert torch.equal(x.to(dtype).double(), x)
