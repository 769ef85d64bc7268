import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.partitioners import classify_nodes

from fuselayers import ops
from fuselayers.partition import default, fuse, min_cut
from fuselayers.partition.joint_graph import JointGraph
from fuselayers.partition.partitioners import SavePolicy
from tests.partition import tracing
from tests.partition.tracing import joint_graph_of


def mlp(x: Tensor, weight: Tensor) -> Tensor:
    return ops.dropout(F.gelu(x @ weight), 0.5).view(-1).exp()


def traced() -> JointGraph:
    return joint_graph_of(mlp, torch.randn(4, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True))


def targets(nodes: "frozenset[torch.fx.Node]") -> set[str]:
    return {str(node.target) for node in nodes}


def test_a_mask_is_made_from_scalars() -> None:
    joint = traced()
    made = targets(joint.made_from_scalars)
    assert "fuselayers.philox_keep.default" in made
    assert not made & {"fuselayers.draw_seed.default", "aten.mm.default", "aten.gelu.default", "primals_1"}


def test_a_table_of_angles_is_made_from_scalars() -> None:
    def rotated(x: Tensor) -> Tensor:
        return x * torch.outer(torch.arange(4.0), torch.arange(3.0)).repeat(1, 2).cos()

    x = torch.randn(8, 4, 6, requires_grad=True)
    joint = joint_graph_of(rotated, x)
    assert "aten.repeat.default" in targets(joint.made_from_scalars)
    for rule in (default, min_cut):
        assert joint.saved_bytes(rule.saved_values(joint, fused=True)) == 0


def test_a_tuple_of_scalars_is_no_scalar() -> None:
    # nll_loss_forward returns two scalars; taken for one, its elements could be neither saved nor recomputed.
    logits, labels = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 1, -100, 4])
    fused = fuse(F.cross_entropy, backend="eager", fallback=())
    (got,) = torch.autograd.grad(fused(logits, labels), logits)
    torch.testing.assert_close(got, torch.autograd.grad(F.cross_entropy(logits, labels), logits)[0])


class TestMutatedInputs:
    # The smaller ones are scalars to us, from which values are made again.
    SHAPES = ((64,), (4,), ())

    def traced(self, *shape: int) -> JointGraph:
        def step(x: Tensor, counts: Tensor) -> Tensor:
            before = counts.clone()
            counts.add_(1)
            return (x * before).sin()

        return joint_graph_of(step, torch.randn(64, 1, requires_grad=True), torch.ones(shape))

    @pytest.mark.parametrize("shape", SHAPES)
    def test_are_read_through_a_clone(self, shape: tuple[int, ...]) -> None:
        joint = self.traced(*shape)
        (counts,) = joint.mutated_inputs
        assert [user.target for user in counts.users if user.op == "call_function"] == [torch.ops.aten.clone.default]
        assert joint.why_not_saveable(counts) == "it is overwritten before backward runs"

    @pytest.mark.parametrize("choice", [default, min_cut], ids=["default", "min_cut"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_clone_is_what_is_saved(self, shape: tuple[int, ...], choice: SavePolicy) -> None:
        joint = self.traced(*shape)
        saved = choice.saved_values(joint, fused=True)
        assert torch.ops.aten.clone.default in [node.target for node in saved]
        assert not joint.mutated_inputs & set(saved)


def test_nodes_are_sorted_as_torch_sorts_them() -> None:
    """AOTAutograd hands both of us the same graphs; torch finds what forward needs by cutting it out."""

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.norm(x).relu(), 0.3) * torch.rand(8)

    graphs = [
        tracing.traced(mlp, torch.randn(4, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)),
        tracing.traced(Norm(), torch.randn(4, 8, requires_grad=True)),
        tracing.GPT.decomposed(layers=2),
    ]
    for graph in graphs:
        joint = graph.joint()
        static = list(graph.options.get("static_lifetime_input_indices") or ())
        theirs = classify_nodes(joint.module, static, graph.options["num_fwd_outputs"])
        assert joint.forward == frozenset(theirs.required_fw_nodes)
        assert joint.from_gradients == frozenset(node for node in theirs.tangents_closure if node.op != "output")
        assert joint.backward == frozenset(node for node in theirs.required_bw_nodes if node.op != "output")
        assert joint.inputs == frozenset(theirs.inputs)
        assert joint.static_inputs == frozenset(theirs.static_lifetime_input_nodes)


@torch.library.custom_op("fuselayers_tests::solver", mutates_args=())
def solver(x: Tensor) -> Tensor:
    return x.cumsum(0)


solver.register_fake(torch.empty_like)
solver.register_autograd(lambda ctx, dy: dy)


def test_an_op_of_unknown_cost_is_kept_though_it_starts_from_scalars() -> None:
    def solved(x: Tensor) -> Tensor:
        return solver(x.sum() + torch.arange(1000.0)).sin()

    joint = joint_graph_of(solved, torch.randn(3, requires_grad=True))
    for rule in (default, min_cut):
        again = joint.recomputed(rule.saved_values(joint, fused=True))
        assert not [node for node in again if "solver" in str(node.target)]
