from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fuselayers.partition import PartitionError, explain, fuse, saved_bytes
from fuselayers.partition.saved_by_default import saved_by_default
from tests.partition.tracing import GPT, joint_graph_of, traced


def names(fn: object, *args: Tensor, dynamic: bool | None = None) -> list[str]:
    return [str(node.target) for node in saved_by_default(joint_graph_of(fn, *args, dynamic=dynamic))]


def test_saves_what_backward_reads() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert names(lambda x: x.sin().cos(), x) == ["primals_1", "aten.sin.default"]


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


def test_nothing_but_views_and_masks_runs_again_in_a_model() -> None:
    joint = GPT.decomposed(layers=2).joint()
    again = joint.recomputed(saved_by_default(joint))
    # The mask of the targets runs in backward only.
    twice = [node for node in again if node in joint.forward and node not in joint.made_from_scalars]
    costly = {str(node.target) for node in twice if not is_free(node)}
    assert costly == set()


def is_free(node: torch.fx.Node) -> bool:
    from fuselayers.partition.node_kinds import is_view

    return is_view(node) or "getitem" in node.name


def test_one_element_of_a_large_tensor_is_not_a_reason_to_keep_it() -> None:
    fused = fuse(lambda v: torch.rand(100, 100)[0, 0].exp() * v, backend="eager", partition="default", fallback=())
    assert saved_bytes(fused, torch.randn(3, requires_grad=True)) <= 16


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


def test_the_boundary_of_checkpointed_layers_is_saved_though_it_is_a_view() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def stack(x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    joint = traced(stack, torch.randn(2, 16, 8, requires_grad=True)).joint()
    again = joint.recomputed(saved_by_default(joint))
    assert not [node for node in again if node.target is torch.ops.aten.addmm.default]


def test_an_input_that_cannot_be_saved() -> None:
    joint = joint_graph_of(torch.sin, torch.randn(4, requires_grad=True))
    next(node for node in joint.nodes if node.name == "primals_1").meta["val"] = 3.5
    text = r"^backward needs the input 'primals_1', which cannot be saved, since it is a float, neither a tensor"
    with pytest.raises(PartitionError, match=text):
        saved_by_default(joint)
