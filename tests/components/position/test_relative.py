import re

import pytest
import torch
from torch import Tensor

from fuselayers.components import RelativePosition
from tests.components.call import Call
from tests.components.compare import assert_same_step, randomise


def written_out(position: RelativePosition, x: Tensor, *, first: int) -> Tensor:
    """The bias of every pair; `test_buckets_are_transformers` checks the buckets."""
    tokens = x.shape[1]
    rows = [[key - first - row for key in range(first + tokens)] for row in range(tokens)]
    return position.table.weight[position.buckets(torch.tensor(rows))].permute(2, 0, 1) + 0 * x.sum()


def bias(position: RelativePosition, x: Tensor, *, first: int) -> Tensor:
    return position.bias(x, first=first) + 0 * x.sum()


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
def test_values_and_gradients(sizes: dict[str, int], causal: bool, tokens: int, first: int) -> None:
    position = randomise(RelativePosition(num_heads=3, causal=causal, **sizes)).double()
    x = torch.randn(2, tokens, 4).double()
    calls = (Call(position, function, {"first": first}) for function in (written_out, bias))
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
def test_errors(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        RelativePosition(**{"num_heads": 2, **options})  # type: ignore[arg-type]
