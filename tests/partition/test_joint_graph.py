import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers import ops
from fuselayers.partition import fuse
from fuselayers.partition.joint_graph import (
    JointGraph,
    is_fusible,
    is_recomputable,
    is_saveable,
    is_view,
    made_from_scalars,
    num_bytes,
    runs_once,
)
from tests.partition.tracing import joint_graph_of


def mlp(x: Tensor, weight: Tensor) -> Tensor:
    return ops.dropout(F.gelu(x @ weight), 0.5).view(-1).exp()


def traced() -> JointGraph:
    return joint_graph_of(mlp, torch.randn(4, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True))


def targets(nodes: "frozenset[torch.fx.Node]") -> set[str]:
    return {str(node.target) for node in nodes}


def test_nodes_are_sorted_by_who_needs_them() -> None:
    joint = traced()
    assert [str(node.target) for node in joint.nodes if node in joint.inputs] == ["primals_1", "primals_2"]
    assert "aten.gelu.default" in targets(joint.forward)
    assert "aten.gelu_backward.default" in targets(joint.from_gradients)
    assert "aten.gelu_backward.default" not in targets(joint.forward)
    assert joint.from_gradients <= joint.backward
    assert joint.num_forward_outputs == 1


def test_kinds_of_ops() -> None:
    joint = traced()
    node = {str(one.target): one for one in joint.nodes if one not in joint.from_gradients}
    matmul, gelu, draw = node["aten.mm.default"], node["aten.gelu.default"], node["fuselayers.draw_seed.default"]
    view, placeholder = node["aten.view.default"], node["primals_1"]
    assert [is_view(one) for one in (matmul, gelu, draw, view, placeholder)] == [False, False, False, True, False]
    assert [is_fusible(one) for one in (matmul, gelu, draw, placeholder)] == [False, True, False, False]
    assert [is_recomputable(one) for one in (matmul, gelu, draw, placeholder)] == [False, True, False, False]
    assert [runs_once(one) for one in (matmul, gelu, draw)] == [False, False, True]
    assert [num_bytes(one) for one in (matmul, draw, placeholder)] == [4 * 16 * 4, 8, 4 * 8 * 4]
    assert is_saveable(matmul)


def test_a_mask_is_made_from_scalars() -> None:
    joint = traced()
    made = targets(made_from_scalars(joint))
    assert "aten.ge.Scalar" in made
    assert not made & {"fuselayers.draw_seed.default", "aten.mm.default", "aten.gelu.default", "primals_1"}


def test_a_tuple_of_scalars_is_no_scalar() -> None:
    # nll_loss_forward returns two scalars; taken for one, its elements could be neither saved nor computed again.
    logits, labels = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 1, -100, 4])
    fused = fuse(F.cross_entropy, backend="eager", fallback=())
    (got,) = torch.autograd.grad(fused(logits, labels), logits)
    torch.testing.assert_close(got, torch.autograd.grad(F.cross_entropy(logits, labels), logits)[0])


def test_split_hands_over_what_it_is_told() -> None:
    joint = traced()
    gelu = next(node for node in joint.nodes if node.target is torch.ops.aten.gelu.default)
    seed = next(node for node in joint.nodes if node.target is torch.ops.fuselayers.draw_seed.default)
    matmul = next(node for node in joint.nodes if node.target is torch.ops.aten.mm.default)
    rest = [*(node for node in joint.nodes if node in joint.inputs), matmul]
    forward, backward = joint.split([*rest, gelu, seed])
    given = {node.name for node in backward.graph.nodes if node.op == "placeholder"}
    assert {"gelu", "draw_seed"} <= given
    returned = {node.name for node in next(iter(reversed(forward.graph.nodes))).all_input_nodes}
    assert {"gelu", "draw_seed"} <= returned
