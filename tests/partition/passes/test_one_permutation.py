import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.partition import fuse
from tests.partition.tracing import ops_of, split_of

DRAW, PERMUTATION = "draw_seed", "randperm"


def dropped_twice(x: Tensor) -> Tensor:
    return ops.dropout(ops.dropout(x, 0.5).sin(), 0.5)


def test_two_draws_read_one_permutation() -> None:
    forward, _ = split_of(dropped_twice, torch.randn(4, 8, requires_grad=True), partition="min_cut")
    assert (ops_of(forward).count(DRAW), ops_of(forward).count(PERMUTATION)) == (2, 1)


def test_a_permutation_that_is_read_elsewhere_stays() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        empty = torch.randperm(0)
        return dropped_twice(x) * torch.ops.fuselayers.draw_seed(empty, device="cpu"), empty

    forward, _ = split_of(fn, torch.randn(4, requires_grad=True), partition="min_cut")
    assert (ops_of(forward).count(DRAW), ops_of(forward).count(PERMUTATION)) == (3, 2)


def test_two_equal_draws_stay_two() -> None:
    for backend in ("eager", "inductor"):
        fused = fuse(lambda x: (ops.dropout(x, 0.5), ops.dropout(x, 0.5)), backend=backend, fallback=())
        first, second = fused(torch.ones(64, requires_grad=True))
        assert not torch.equal(first, second)
        torch.manual_seed(3)
        masks = fused(torch.ones(64, requires_grad=True))
        torch.manual_seed(3)
        assert all(torch.equal(mask, ops.dropout(torch.ones(64), 0.5)) for mask in masks)
