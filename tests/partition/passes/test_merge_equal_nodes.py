from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fuselayers import ops
from fuselayers.ops import draw_seed
from fuselayers.partition import fuse
from fuselayers.partition.passes import merge_equal_nodes_pass
from fuselayers.testing import results
from tests.partition.tracing import Hand, joint_graph_of, ops_of, split_of


def merged(fn: Callable[..., Any], *args: Tensor) -> tuple[fx.GraphModule, list[str]]:
    module = merge_equal_nodes_pass(make_fx(fn, tracing_mode="fake")(*args))
    return module, ops_of(module)


def test_equal_calls_become_one() -> None:
    x = torch.randn(4)
    module, calls = merged(lambda x: (x.sin() * 2 + x.sin() * 2) * 1.5, x)
    assert calls.count("sin") == 1
    assert calls.count("mul") == 2
    torch.testing.assert_close(module(x), (x.sin() * 4) * 1.5)


def test_draws_stay_apart() -> None:
    _, calls = merged(lambda x: (x * draw_seed() * draw_seed()).sum(), torch.randn(4))
    assert calls.count("draw_seed") == 2
    _, calls = merged(lambda x: (torch.rand_like(x) * torch.rand_like(x)).sum(), torch.randn(4))
    assert calls.count("rand_like") == 2


def test_two_outputs_stay_two_tensors() -> None:
    module, _ = merged(lambda x: (x.sin(), x.sin()), torch.randn(4))
    first, second = module(torch.randn(4))
    assert first.data_ptr() != second.data_ptr()


def test_a_graph_that_mutates_is_left_alone() -> None:
    def mutate(x: Tensor) -> Tensor:
        before = x.sin()
        x.add_(1)
        return (before + x.sin()).cos()

    _, calls = merged(mutate, torch.randn(4))
    assert calls.count("sin") == 2


def by_hand(*metas: dict[str, Any]) -> list[str]:
    """The ops left of a graph that calls the same sine once with each `meta`."""
    hand = Hand("x")
    (total,) = hand.inputs
    for meta in metas:
        sine = hand.call(torch.ops.aten.sin.default, *hand.inputs, **meta)
        total = hand.call(torch.ops.aten.add.Tensor, total, sine)
    return ops_of(merge_equal_nodes_pass(hand.module(total)))


class TestNotAcross:
    def test_the_cut(self) -> None:
        forward, backward = {"partitioner_tag": "is_forward"}, {"partitioner_tag": "is_backward"}
        assert by_hand(forward, forward, {}).count("sin") == 1
        assert by_hand(forward, backward, backward).count("sin") == 2
        # Nodes from the backward of an autograd.Function have a sequence number, but no tag.
        assert by_hand({"seq_nr": 1, **forward}, {"seq_nr": 1}).count("sin") == 2

    def test_checkpointed_regions(self) -> None:
        first, second = ({"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": region} for region in (1, 2))
        assert by_hand(first, first).count("sin") == 1
        assert by_hand(first, second).count("sin") == 2
        assert by_hand(first, {}).count("sin") == 2


def test_zero_and_minus_zero_stay_apart() -> None:
    module, _ = merged(lambda x: torch.stack([1 / (x * 0.0), 1 / (x * -0.0)]), torch.ones(2))
    assert torch.equal(module(torch.ones(2)), torch.tensor([[torch.inf] * 2, [-torch.inf] * 2]))


def test_a_graph_that_only_copies_into_inputs_is_merged() -> None:
    norm = torch.nn.BatchNorm1d(3)
    joint = joint_graph_of(lambda x: norm(x) + x.sin() * x.sin(), torch.randn(4, 3, requires_grad=True))
    assert ops_of(joint.module).count("sin") == 1


def mlp(x: Tensor, weight: Tensor) -> Tensor:
    """Backward needs the mask twice: for the dropped value, and for its gradient."""
    return ops.bias_activation_dropout(x, activation="gelu", p=0.3, seed=torch.tensor(3)) @ weight


def test_backward_makes_each_mask_once() -> None:
    inputs = torch.randn(16, 24, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    forward, backward = split_of(mlp, *inputs, partition="min_cut")
    for module in (forward, backward):
        assert len(module.graph.find_nodes(op="call_function", target=torch.ops.fuselayers.keep_factors.default)) == 1
    torch.testing.assert_close(results(fuse(mlp, backend="eager"), inputs), results(mlp, inputs))


def dropped_twice(x: Tensor) -> Tensor:
    return ops.dropout(ops.dropout(x, 0.5).sin(), 0.5)


def test_two_draws_read_one_permutation() -> None:
    forward, _ = split_of(dropped_twice, torch.randn(4, 8, requires_grad=True), partition="min_cut")
    assert (ops_of(forward).count("draw_seed"), ops_of(forward).count("randperm")) == (2, 1)


def test_a_permutation_that_is_read_elsewhere_stays() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        empty = torch.randperm(0)
        return dropped_twice(x) * torch.ops.fuselayers.draw_seed(empty, device="cpu"), empty

    forward, _ = split_of(fn, torch.randn(4, requires_grad=True), partition="min_cut")
    assert (ops_of(forward).count("draw_seed"), ops_of(forward).count("randperm")) == (3, 2)


def test_two_equal_draws_stay_two() -> None:
    for backend in ("eager", "inductor"):
        fused = fuse(lambda x: (ops.dropout(x, 0.5), ops.dropout(x, 0.5)), backend=backend, fallback=())
        first, second = fused(torch.ones(64, requires_grad=True))
        assert not torch.equal(first, second)
        torch.manual_seed(3)
        masks = fused(torch.ones(64, requires_grad=True))
        torch.manual_seed(3)
        assert all(torch.equal(mask, ops.dropout(torch.ones(64), 0.5)) for mask in masks)
