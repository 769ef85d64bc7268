import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.testing import LAYOUTS, check_layouts, samples

FULL = [name for name in LAYOUTS if name != "0-sized"]


def triple(x: Tensor, y: Tensor) -> Tensor:
    return x * 3 + y


def kind(x: Tensor) -> str:
    """The name of a [6, 9] tensor's layout."""
    names = {
        (9, 1): "contiguous",
        (1, 6): "transposed",
        (18, 1): "chunked" if x.storage_offset() else "sliced rows",
        (18, 2): "sliced columns",
        (0, 1): "expanded",
    }
    return "0-sized" if not x.numel() else names[x.stride()]


def test_every_layout_of_the_input_meets_every_one_of_the_gradient() -> None:
    met = set()

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.kind = kind(x)
            if x.numel():
                assert kind(x) != kind(y)
            return triple(x, y)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            met.add((ctx.kind, kind(dy)))
            return dy * 3, dy

    check_layouts(Noting.apply, triple, samples((6, 9), (6, 9)))
    assert met == {*itertools.product(FULL, FULL), ("0-sized", "0-sized")}


class _Careless(torch.autograd.Function):
    """Wrong for one layout of x or of dy only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, of_x: str, of_dy: str) -> Tensor:
        ctx.of_dy = of_dy
        if not x.numel():
            return triple(x, y) if of_x != "0-sized" else triple(x, y).double()
        return triple(x, y) + (kind(x) == of_x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy * (4 if kind(dy) == ctx.of_dy else 3), dy, None, None


def careless(of_x: str = "", of_dy: str = "") -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: _Careless.apply(x, y, of_x, of_dy)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_function_that_minds_one_layout_of_its_input_is_seen(name: str) -> None:
    inputs = samples((6, 9), (6, 9))
    check_layouts(careless(), triple, inputs)
    with pytest.raises(AssertionError, match=rf"^{name} input, contiguous gradient: y0: "):
        check_layouts(careless(of_x=name), triple, inputs)


@pytest.mark.parametrize("name", FULL)
def test_a_function_that_minds_one_layout_of_its_incoming_gradient_is_seen(name: str) -> None:
    with pytest.raises(AssertionError, match=rf"^contiguous input, {name} gradient: d0: error"):
        check_layouts(careless(of_dy=name), triple, samples((6, 9), (6, 9)))


def test_a_function_that_takes_one_inputs_strides_for_the_others_is_seen() -> None:
    def confused(x: Tensor, y: Tensor) -> Tensor:
        return triple(x, y if x.stride() == y.stride() else y.flip(0))

    with pytest.raises(AssertionError, match="y0: error"):
        check_layouts(confused, triple, samples((6, 9), (6, 9)))
