import pytest
import torch
from torch import Tensor

from fuselayers.partition import CostModel
from fuselayers.partition.joint_graph import JointGraph
from tests.partition.tracing import joint_graph_of

BYTES = 16 * 16 * 4


def chain(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).sin().exp() @ weight


def node_of(joint: JointGraph, target: object) -> torch.fx.Node:
    return next(node for node in joint.nodes if node.target is target and node in joint.forward)


@pytest.fixture
def joint() -> JointGraph:
    return joint_graph_of(chain, *[torch.randn(16, 16, requires_grad=True) for _ in range(2)])


def test_what_is_in_memory_anyway_is_cheaper_to_save(joint: JointGraph) -> None:
    cost = CostModel(memory_price=0.0)
    matmul, sine = node_of(joint, torch.ops.aten.mm.default), node_of(joint, torch.ops.aten.sin.default)
    assert cost.saving(matmul, joint) == pytest.approx(BYTES, rel=0.01)  # backward's read
    assert cost.saving(sine, joint) == pytest.approx(2 * BYTES, rel=0.01)  # and the write that fusion had avoided


def test_memory_has_a_price(joint: JointGraph) -> None:
    sine = node_of(joint, torch.ops.aten.sin.default)
    dear, free = CostModel(memory_price=0.5), CostModel(memory_price=0.0)
    assert dear.saving(sine, joint) - free.saving(sine, joint) == pytest.approx(0.5 * BYTES)


def test_recomputing_is_nearly_free_inside_a_kernel_only(joint: JointGraph) -> None:
    sine = node_of(joint, torch.ops.aten.sin.default)
    feeds_matmul = node_of(joint, torch.ops.aten.exp.default)
    assert CostModel().recomputing(sine, joint) < 0.1 * BYTES
    assert CostModel().recomputing(feeds_matmul, joint) > BYTES  # backward's matmul reads it from memory
    assert CostModel(fused=False).recomputing(sine, joint) == 2 * BYTES


def test_parameters_cost_nothing(joint: JointGraph) -> None:
    weight = next(node for node in joint.nodes if node.name == "primals_2")
    static = JointGraph(
        **{name: getattr(joint, name) for name in joint.__dataclass_fields__} | {"static_inputs": frozenset({weight})}
    )
    assert CostModel().saving(weight, static) == 0
    assert CostModel().saving(weight, joint) > 0
