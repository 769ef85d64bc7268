import inspect
import re

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from fuselayers import ops
from fuselayers.partition import CostModel, PartitionError, machine_of
from fuselayers.partition.choose.cost import flops_of
from fuselayers.partition.choose.min_cut import saved_by_min_cut
from fuselayers.partition.joint_graph import JointGraph
from tests.partition.tracing import gpt, joint_graph_of

PRICES = [0.0, 0.3, 1.5, 10.0, 1e3, 1e9]


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def at(price: float, *, fused: bool) -> CostModel:
    return CostModel(machine_of("cpu"), fused=fused, memory_price=price)


@pytest.fixture(scope="module")
def model() -> JointGraph:
    return gpt().joint()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fused", [True, False])
def test_at_the_default_price_no_matmul_runs_again(model: JointGraph, fused: bool, device: str) -> None:
    saved = saved_by_min_cut(model, cost=CostModel(machine_of(device), fused=fused))
    again = [node.name for node in model.recomputed(saved) if flops_of(node) > 0]
    assert again == []
    assert saved


@pytest.mark.parametrize("fused", [True, False])
def test_no_mask_is_saved_at_any_price(model: JointGraph, fused: bool) -> None:
    own = joint_graph_of(lambda x: ops.dropout(x.sin(), 0.5), leaf(8, 64))
    for joint in (model, own):
        assert joint.made_from_scalars
        for price in PRICES:
            saved = saved_by_min_cut(joint, cost=at(price, fused=fused))
            assert "fuselayers.draw_seed.default" in {str(node.target) for node in saved}
            assert joint.made_from_scalars.isdisjoint(saved)
            # `eq` compares the labels with every class in the loss.
            assert {node.name for node in saved if getattr(node.meta["val"], "dtype", None) is torch.bool} <= {
                "eq_tensor"
            }


@pytest.mark.parametrize("fused", [True, False])
def test_a_higher_price_of_memory_never_saves_more(model: JointGraph, fused: bool) -> None:
    sizes = [model.saved_bytes(saved_by_min_cut(model, cost=at(price, fused=fused))) for price in PRICES]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_a_value_that_can_be_neither_saved_nor_recomputed_is_named() -> None:
    def layer(x: Tensor) -> Tensor:
        return x.exp().sinh()

    joint = joint_graph_of(layer, leaf(8, 8))
    exp = next(node for node in joint.nodes if node.name == "exp")
    exp.meta["val"] = 3.5
    exp.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    place = rf"\({re.escape(__file__)}:{inspect.getsourcelines(layer)[1] + 1}: return x\.exp\(\)\.sinh\(\)\)"
    text = (
        rf"^(to compute 'cosh' {place}, )?backward needs 'exp' {place}, which cannot be saved, since it is a "
        r"float, neither a tensor nor a size, nor recomputed, since it may run only once: it is tagged to be "
        r"saved\. Return it from"
    )
    with pytest.raises(PartitionError, match=text):
        saved_by_min_cut(joint, cost=CostModel(machine_of("cpu")))
