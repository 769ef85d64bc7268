from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fuselayers._torch.dispatch import DataDependentOutputException
from fuselayers.ops import draw_seed
from fuselayers.partition.side_effects import SideEffects, side_effects


def found(fn: Callable[..., Any], *inputs: Any) -> SideEffects:
    return side_effects(fn, inputs)


def test_a_pure_graph() -> None:
    x = torch.randn(3, requires_grad=True)
    assert found(lambda x, scale: (x * scale).cos(), x, 2.0) == SideEffects(frozenset(), draws=False)


def test_what_is_overwritten_is_named_by_its_place_and_stays_as_it_is() -> None:
    x, y, state = torch.ones(2), torch.ones(2), torch.zeros(2)

    def step(x: Tensor, y: Tensor, state: Tensor) -> Tensor:
        state[1:].mul_(2)
        y.add_(1)
        return x + state

    assert found(step, x, y, state) == SideEffects(frozenset({1, 2}), draws=False)
    assert torch.equal(y, torch.ones(2))


@pytest.mark.parametrize(
    ("fn", "draws"),
    [
        (lambda x: F.dropout(x, 0.5), True),
        (lambda x: F.dropout(x, 0.5, training=False), False),
        (lambda x: x + torch.rand_like(x), True),
        (lambda x: x * torch.rand(1), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x), False),
        (lambda x: x * draw_seed(device="cpu"), False),
    ],
)
def test_draws(fn: Callable[[Tensor], Tensor], draws: bool) -> None:
    before = torch.get_rng_state()
    assert found(fn, torch.ones(2, 3, 4)).draws is draws
    assert torch.equal(torch.get_rng_state(), before)


def test_a_graph_that_needs_a_value_raises() -> None:
    with pytest.raises(DataDependentOutputException):
        found(lambda x: torch.full((3,), x.sum().item()), torch.ones(2))


def test_running_statistics_are_overwritten_though_no_schema_says_so() -> None:
    norm = nn.BatchNorm1d(3)

    def run(x: Tensor, weight: Tensor, mean: Tensor, bias: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, weight, bias, training=True)

    parts = norm.weight, norm.running_mean, norm.bias, norm.running_var
    assert found(run, torch.randn(4, 3), *parts).overwritten == {2, 4}


def test_a_write_through_data_is_one() -> None:
    def step(x: Tensor, state: Tensor) -> Tensor:
        state.data.add_(1)
        return x * state

    assert found(step, torch.ones(2), torch.ones(2)).overwritten == {1}


def test_a_write_by_somebodys_op_is_one() -> None:
    library = torch.library.Library("side_effects_test", "DEF")
    library.define("bump(Tensor x, Tensor(a!)[] counters) -> ()")
    library.impl("bump", lambda x, counters: None, "CompositeExplicitAutograd")
    torch.library.register_fake("side_effects_test::bump", lambda x, counters: None, lib=library)

    def step(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        torch.ops.side_effects_test.bump(x, [one, other])
        return x * one

    assert found(step, torch.ones(2), torch.ones(2), torch.ones(2)).overwritten == {1, 2}


def test_in_inference_mode() -> None:
    with torch.inference_mode():
        x, y = torch.ones(2), torch.ones(2)
        assert found(lambda x, y: y.add_(x) * x, x, y) == SideEffects(frozenset({1}), draws=False)
