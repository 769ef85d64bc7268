from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.partition import explain
from fuselayers.partition.choose.default import saved_by_default
from tests.partition.tracing import joint_graph_of


def names(fn: object, *args: Tensor) -> list[str]:
    return [str(node.target) for node in saved_by_default(joint_graph_of(fn, *args))]


def test_views_stand_for_what_they_look_at() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert names(lambda x: x.exp().view(8, 4).t().cos(), x) == ["aten.exp.default"]


def test_a_size_stands_for_its_tensor() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    joint = joint_graph_of(lambda x: x.exp().sum() / x.shape[0], x, dynamic=True)
    saved = saved_by_default(joint)
    sizes = [node for node in saved if isinstance(node.meta["val"], torch.SymInt)]
    assert sizes
    assert [str(node.target) for node in saved if node not in sizes] == ["aten.exp.default"]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_one_hot_mask_of_targets_is_not_saved(backend: str) -> None:
    logits, targets = torch.randn(16, 300, requires_grad=True), torch.randint(300, (16,))
    totals = explain(F.cross_entropy, logits, targets, backend=backend, partition="default").totals
    assert totals["this"].saved_bytes <= totals["eager"].saved_bytes


def test_a_mask_that_forward_makes_for_backward_is_saved_where_it_is_smaller_than_its_source() -> None:
    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x > 0)
            return x.relu()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            (mask,) = ctx.saved_tensors
            return dy * mask

    x = torch.randn(16, 300, requires_grad=True)
    assert names(lambda x: Gate.apply(x * 2), x) == ["aten.gt.Scalar"]
