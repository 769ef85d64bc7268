import warnings
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, nop
from torch import Tensor
from torch._functorch.partitioners import classify_nodes

from fuselayers import ops
from fuselayers.partition import budget, default, fuse, min_cut, saved_bytes
from fuselayers.partition.joint_graph import JointGraph
from fuselayers.partition.node_kinds import num_bytes
from fuselayers.partition.partitioners import SavePolicy
from tests.partition import tracing
from tests.partition.tracing import joint_graph_of, ops_of, split_of


def mlp(x: Tensor, weight: Tensor) -> Tensor:
    return ops.dropout(F.gelu(x @ weight), 0.5).view(-1).exp()


def traced() -> JointGraph:
    return joint_graph_of(mlp, torch.randn(4, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True))


def targets(nodes: "frozenset[torch.fx.Node]") -> set[str]:
    return {str(node.target) for node in nodes}


def test_a_mask_is_made_from_scalars() -> None:
    joint = traced()
    made = targets(joint.made_from_scalars)
    assert "fuselayers.keep_factors.default" in made
    assert not made & {"fuselayers.draw_seed.default", "aten.mm.default", "aten.gelu.default", "primals_1"}


def test_a_table_of_angles_is_made_from_scalars() -> None:
    def rotated(x: Tensor) -> Tensor:
        return x * torch.outer(torch.arange(4.0), torch.arange(3.0)).repeat(1, 2).cos()

    x = torch.randn(8, 4, 6, requires_grad=True)
    joint = joint_graph_of(rotated, x)
    assert "aten.repeat.default" in targets(joint.made_from_scalars)
    for rule in (default, min_cut):
        assert joint.saved_bytes(rule.saved_values(joint, fused=True)) == 0


def test_a_mask_of_documents_numbered_by_a_cumulative_sum_is_made_from_scalars() -> None:
    def attend(x: Tensor) -> Tensor:
        document = (torch.arange(16) % 5 == 0).cumsum(0)
        return (x @ x.t()).masked_fill(document[:, None] != document, -1e9)

    joint = joint_graph_of(attend, torch.randn(16, 4, requires_grad=True))
    for rule in (default, min_cut):
        assert joint.saved_bytes(rule.saved_values(joint, fused=False)) == 16 * 4 * 4  # x


@pytest.mark.parametrize("rule", [default, min_cut, budget(0.5)], ids=["default", "min_cut", "budget"])
def test_a_size_traced_in_backward_is_saved_instead_of_its_tensor(rule: SavePolicy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own
        summed = aot_function(lambda x: x.sum(dim=1), nop, partition_fn=rule, dynamic=True)
        x = torch.randn(100, 50, requires_grad=True)
        assert saved_bytes(summed, x) == 0
        (got,) = torch.autograd.grad(summed(x).sin().sum(), x)
    torch.testing.assert_close(got, x.detach().sum(1, keepdim=True).cos().expand(100, 50))


class TestScalarsHaveAPrice:
    def test_one_instead_of_those_that_it_is_made_from(self) -> None:
        inputs = [torch.randn(3, requires_grad=True) for _ in range(4)]
        joint = joint_graph_of(lambda a, b, c, d: (a + b + c + d).cos().cos(), *inputs)
        assert joint.saved_bytes(min_cut.saved_values(joint, fused=True)) == 12
        assert joint.saved_bytes(min_cut.saved_values(joint, fused=False)) == 24  # as plain eager

    @pytest.mark.parametrize("rule", [default, min_cut], ids=["default", "min_cut"])
    def test_the_mean_of_many_losses(self, rule: SavePolicy) -> None:
        losses = [torch.randn((), requires_grad=True) for _ in range(64)]
        joint = joint_graph_of(lambda *losses: torch.stack(losses).mean().exp(), *losses)
        assert joint.saved_bytes(rule.saved_values(joint, fused=True)) == 4

    def test_many_losses_fit_half_of_the_bytes_that_eager_saves(self) -> None:
        losses = [torch.randn((), requires_grad=True) for _ in range(64)]
        joint = joint_graph_of(lambda *losses: torch.stack([loss.sin() for loss in losses]).exp(), *losses)
        for fused in (False, True):
            assert joint.saved_bytes(budget(0.5).saved_values(joint, fused=fused)) == 256

    def test_op_by_op_no_scalar_is_computed_again(self) -> None:
        def chain(x: Tensor) -> Tensor:
            for _ in range(50):
                x = x.sin()
            return x

        _, backward = split_of(chain, torch.randn(4, requires_grad=True), partition="min_cut", fused=False)
        assert len(ops_of(backward)) == 100  # a cosine and a product for each sine

    def test_a_long_chain_takes_as_long_per_op_as_a_short_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each op was priced by all that came before it: 4,000 ops took a second."""
        asked = []
        monkeypatch.setattr(
            import_module("fuselayers.partition.joint_graph"),
            "num_bytes",
            lambda node: asked.append(node) or num_bytes(node),
        )

        def sum_of(*terms: Tensor) -> Tensor:
            total = terms[0]
            for term in terms[1:]:
                total = total + term
            return total.sin()

        for length in (50, 200):
            joint = joint_graph_of(sum_of, *(torch.randn(4, requires_grad=True) for _ in range(length)))
            asked.clear()
            assert not joint.made_from_scalars
            assert len(asked) < 10 * length


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
