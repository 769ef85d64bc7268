import math
import re

import pytest
import torch
from torch import Tensor

from fuselayers.components import (
    ALiBiPosition,
    LearnedPosition,
    NoPosition,
    Position,
    RelativePosition,
    SinusoidalPosition,
)
from tests.components.call import Call
from tests.components.compare import assert_same_step, randomise


def test_the_base_and_none_change_nothing() -> None:
    x, q, k = torch.randn(2, 3, 4), torch.randn(2, 4, 3, 2), torch.randn(2, 2, 3, 2)
    for position in (Position(), NoPosition()):
        assert position(x) is x
        assert position.rotate(q, k) == (q, k)
        assert not list(position.parameters())


def test_each_token_gets_the_learned_row_of_its_place() -> None:
    position = LearnedPosition(5, 3)
    x = torch.randn(2, 4, 3)
    got = position(x)
    for place in range(4):
        torch.testing.assert_close(got[:, place], x[:, place] + position.table.weight[place])


def test_a_full_context_fits_and_a_longer_one_does_not() -> None:
    position = LearnedPosition(4, 3)
    position(torch.zeros(1, 4, 3))
    text = (
        "a sequence of 5 tokens does not fit the context_length 4; shorten it, or build the model with a longer context"
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        position(torch.zeros(1, 5, 3))


def table(x: Tensor, *, base: float, first: int) -> Tensor:
    """Add the table of section 3.5, entry by entry in Python's floats."""
    tokens, hidden_dim = x.shape[-2:]
    table = torch.empty(tokens, hidden_dim, dtype=torch.float64)
    for row in range(tokens):
        for channel in range(hidden_dim):
            angle = (first + row) / base ** (channel // 2 * 2 / hidden_dim)
            table[row, channel] = math.cos(angle) if channel % 2 else math.sin(angle)
    return x + table


@pytest.mark.parametrize(
    ("base", "hidden_dim", "tokens", "first"),
    [(10000.0, 1, 129, 0), (10000.0, 2, 1, 40), (50.0, 7, 129, 40), (10000.0, 16, 129, 0), (50.0, 16, 1, 40)],
)
def test_sinusoidal_is_the_papers_table(base: float, hidden_dim: int, tokens: int, first: int) -> None:
    x = torch.randn(2, tokens, hidden_dim).double()
    position = SinusoidalPosition(base=base)
    assert_same_step(
        lambda x: table(x, base=base, first=first),
        lambda x: position(x, first=first),
        x,
        rtol=0,
        atol=2e-5,  # the angles are float32
    )


def slopes(num_heads: int) -> list[float]:
    """As in the authors' released code, `get_slopes`."""

    def of_a_power(heads: int) -> list[float]:
        start = 2 ** -(2 ** -(math.log2(heads) - 3))
        return [start * start**place for place in range(heads)]

    if math.log2(num_heads).is_integer():
        return of_a_power(num_heads)
    closest = 2 ** math.floor(math.log2(num_heads))
    return of_a_power(closest) + slopes(2 * closest)[0::2][: num_heads - closest]


@pytest.mark.parametrize(
    ("num_heads", "tokens", "first"),
    [*((num_heads, 3, 5) for num_heads in (1, 2, 3, 6, 8, 12, 25, 64, 71)), (6, 1, 0), (6, 7, 0), (6, 1, 5)],
)
def test_alibi_is_the_authors_bias(num_heads: int, tokens: int, first: int) -> None:
    got = ALiBiPosition(num_heads=num_heads).distance_bias(torch.zeros(2, tokens, 4, dtype=torch.float64), first=first)
    rows = [[-slope * abs(distance) for distance in range(1 - first - tokens, tokens)] for slope in slopes(num_heads)]
    torch.testing.assert_close(got, torch.tensor(rows, dtype=torch.float64), rtol=1e-6, atol=1e-7)


def test_errors_of_alibi() -> None:
    with pytest.raises(ValueError, match=r"^num_heads must be at least 1, got 0$"):
        ALiBiPosition(num_heads=0)


def relative(position: RelativePosition, x: Tensor, *, first: int) -> Tensor:
    """The bias of every distance; `test_buckets_are_transformers` checks the buckets."""
    tokens = x.shape[1]
    distances = list(range(1 - first - tokens, tokens))
    return position.table.weight[position.buckets(torch.tensor(distances))].T + 0 * x.sum()


def bias_of(position: RelativePosition, x: Tensor, *, first: int) -> Tensor:
    return position.distance_bias(x, first=first) + 0 * x.sum()


SIZES = [
    {},
    {"num_buckets": 8, "max_distance": 20},
    {"num_buckets": 4, "max_distance": 5},
    {"num_buckets": 7, "max_distance": 9},
]


# Small tables end before, at and after these distances; without `causal` half of each table is for later keys.
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (40, 0), (3, 30)])
def test_relative_values_and_gradients(sizes: dict[str, int], causal: bool, tokens: int, first: int) -> None:
    position = randomise(RelativePosition(num_heads=3, causal=causal, **sizes)).double()
    x = torch.randn(2, tokens, 4).double()
    calls = (Call(position, function, {"first": first}) for function in (relative, bias_of))
    assert_same_step(*calls, x, rtol=1e-9, atol=1e-9)


# An odd table is divided at another place with `causal` than without.
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [*SIZES, {"num_buckets": 64, "max_distance": 1000}])
def test_buckets_are_transformers(sizes: dict[str, int], causal: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    position = RelativePosition(num_heads=1, causal=causal, **sizes)
    distance = torch.arange(-1500, 1500)
    theirs = t5.T5Attention._relative_position_bucket(
        distance,
        bidirectional=not causal,
        num_buckets=position.table.num_embeddings,
        max_distance=position.max_distance,
    )
    assert torch.equal(position.buckets(distance), theirs)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_buckets": 1, "causal": True}, "num_buckets must be at least 2 where attention is causal, got 1"),
        (
            {"num_buckets": 3, "causal": False},
            "num_buckets must be at least 4 where attention is not causal, got 3",
        ),
        (
            {"max_distance": 16, "causal": True},
            "max_distance must be above 16, got 16: with 32 buckets, each smaller distance has a bucket; raise it, or "
            "use fewer buckets",
        ),
    ],
)
def test_errors_of_relative(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        RelativePosition(**{"num_heads": 2, **options})  # type: ignore[arg-type]
