import time
from typing import Any

import torch
from torch import Tensor

from fuselayers.partition.measure import copies_of, seconds_of


def test_the_slower_takes_longer_backward_included() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            time.sleep(0.01)
            return grad

    x = torch.ones(3, requires_grad=True)
    seconds = seconds_of(
        {"eager": lambda x: (Slow.apply(x),), "unfused": lambda x: (x * 1,)}, [x], overwritten=frozenset()
    )
    assert seconds["eager"] > 0.01 > seconds["unfused"] > 0
    assert x.grad is None


def test_autocast_keeps_no_copies_of_weights() -> None:
    kept = []

    def product(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        kept.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return (x @ weight,)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = [torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)]
        seconds_of({"eager": product}, given, overwritten=frozenset())
        assert torch.is_autocast_cache_enabled()
    assert set(kept) == {(True, False)}


def test_copies_share_memory_where_nobody_writes() -> None:
    x, written, whole = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), 7
    given, leaves = copies_of([x, written, whole], frozenset({1}))
    assert [one.data_ptr() == other.data_ptr() for one, other in zip(given[:2], (x, written), strict=True)] == [
        True,
        False,
    ]
    given[1].add_(1)
    assert written.tolist() == [1.0] * 3
    assert given[2] == whole
    assert [leaf.is_leaf and leaf.requires_grad for leaf in leaves] == [True, True]
    assert leaves[0] is not x
