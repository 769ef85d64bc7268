from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops.residual_layer_norm import residual_layer_norm_reference
from fuselayers.testing import DTYPES, assert_as_good_as, samples


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


class TestNotFinite:
    """A result that is infinite in one place must match the reference there and elsewhere."""

    @staticmethod
    def hidden(x: Tensor) -> Tensor:
        return x.masked_fill(torch.eye(5, device=x.device).bool(), -torch.inf)

    def test_the_same(self) -> None:
        assert_as_good_as(self.hidden, self.hidden, samples((5, 5)))

    @pytest.mark.parametrize(
        ("at", "value", "problem"),
        [
            ((1, 1), 3.0, "y0: wanted -inf, got 3"),
            ((1, 1), torch.inf, "y0: wanted -inf, got inf"),
            ((1, 1), torch.nan, "y0: wanted -inf, got nan"),
            ((1, 2), torch.nan, "y0: error nan, allowed"),
            ((1, 2), torch.inf, "y0: error inf, allowed"),
            ((1, 2), 9.0, r"y0: error \d"),
        ],
    )
    def test_another_in_one_place(self, at: tuple[int, int], value: float, problem: str) -> None:
        def changed(x: Tensor) -> Tensor:
            y = self.hidden(x)
            y[at] = value
            return y

        with pytest.raises(AssertionError, match=f"^{problem}"):
            assert_as_good_as(changed, self.hidden, samples((5, 5)))

    def test_a_value_that_overflows_only_in_the_reference_may_be_finite(self) -> None:
        def squared(x: Tensor) -> Tensor:
            return (x * 128) ** 2 / 128**2

        def wide(x: Tensor) -> Tensor:
            return squared(x.float()).half()

        def wrong(x: Tensor) -> Tensor:
            return wide(x) + 1

        inputs = samples((5, 5), dtype=torch.float16)
        assert squared(inputs[0]).isinf().any()
        assert_as_good_as(squared, squared, inputs)
        assert_as_good_as(wide, squared, inputs)
        with pytest.raises(AssertionError, match=r"^y0: error 1"):
            assert_as_good_as(wrong, squared, inputs)


def test_a_function_that_overwrites_its_inputs_is_seen() -> None:
    class Wipes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, what: str) -> Tensor:
            y = x * 2
            ctx.what = what
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
            dx = dy * 2
            x, y = ctx.saved_tensors
            {"x": x, "y": y, "dy": dy, "nothing": dx.clone()}[ctx.what].detach().zero_()
            return dx, None

    def double(x: Tensor) -> Tensor:
        return x * 2

    assert_as_good_as(lambda x: Wipes.apply(x, "nothing"), double, samples((3, 5)))
    for what, name in (("x", "input 0"), ("y", "y0"), ("dy", "the gradient of y0")):
        with pytest.raises(AssertionError, match=f"^the backward overwrote {name}$"):
            assert_as_good_as(lambda x, what=what: Wipes.apply(x, what), double, samples((3, 5)))

    def wipes(place: Tensor, x: Tensor) -> Tensor:
        y = x[place]
        place.zero_()
        return y

    with pytest.raises(AssertionError, match=r"^the forward overwrote input 0$"):
        assert_as_good_as(wipes, lambda place, x: x[place], [torch.arange(3), *samples((3, 5))])
