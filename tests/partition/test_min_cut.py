from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from fuselayers import ops
from fuselayers.partition import CostModel
from fuselayers.partition.flow import SINK, SOURCE
from fuselayers.partition.min_cut import flow_graph, saved_by_min_cut
from tests.partition.tracing import joint_graph_of


def wave(x: Tensor) -> Tensor:
    return x.sin().exp().cos() * 2


def test_every_edge_has_a_reason() -> None:
    graph = flow_graph(joint_graph_of(wave, torch.randn(8, requires_grad=True)), cost=CostModel())
    reasons = {data["reason"] for _, _, data in graph.edges(data=True)}
    assert "is an input of the forward" in reasons
    assert "costs this to save" in reasons
    assert "depends on an incoming gradient" in reasons
    assert graph.has_node(SOURCE)
    assert graph.has_node(SINK)


def test_a_higher_price_of_memory_never_saves_more() -> None:
    joint = joint_graph_of(lambda x, w: wave(x @ w) @ w, *[torch.randn(8, 8, requires_grad=True) for _ in range(2)])
    sizes = []
    for price in (-0.9, 0.0, 0.5, 100.0):
        saved = saved_by_min_cut(joint, cost=CostModel(memory_price=price))
        sizes.append(sum(node.meta["val"].untyped_storage().nbytes() for node in saved if node not in joint.inputs))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_a_value_that_can_neither_be_saved_nor_computed_again_is_named() -> None:
    joint = joint_graph_of(lambda x: wave(x), torch.randn(8, requires_grad=True))
    for node in joint.nodes:
        if node.op == "call_function" and node not in joint.from_gradients:
            node.meta["val"] = 3.5  # no tensor, no size
    exponential = next(node for node in joint.nodes if node.target is torch.ops.aten.exp.default)
    exponential.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    text = r"^backward needs '.*', which cannot be saved \(it is neither a tensor nor a size\), nor computed again, "
    with pytest.raises(ValueError, match=text + "since 'exp' may run only once$"):
        saved_by_min_cut(joint, cost=CostModel())


def test_masks_come_from_seeds_under_every_price() -> None:
    joint = joint_graph_of(lambda x: ops.dropout(x.sin(), 0.5), torch.randn(8, 64, requires_grad=True))
    for cost in (CostModel(), CostModel(memory_price=-0.9), replace(CostModel(), fused=False)):
        names = [str(node.target) for node in saved_by_min_cut(joint, cost=cost)]
        assert "fuselayers.draw_seed.default" in names
        assert not [node for node in saved_by_min_cut(joint, cost=cost) if node.meta["val"].dtype is torch.bool]
