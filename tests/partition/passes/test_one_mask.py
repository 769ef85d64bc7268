import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.partition import fuse
from fuselayers.partition.passes import one_mask_pass
from tests.partition.tracing import split_of

KEEP = torch.ops.fuselayers.keep_factors.default
SEED = torch.tensor(3)


def mlp(x: Tensor, weight: Tensor) -> Tensor:
    """Backward needs the dropped value, for the weight's gradient, and its gradient."""
    return ops.bias_activation_dropout(x, activation="gelu", p=0.3, seed=SEED) @ weight


def test_backward_makes_each_mask_once() -> None:
    inputs = torch.randn(16, 24, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    forward, backward = split_of(mlp, *inputs, partition="min_cut")
    made = [[node.kwargs for node in one.graph.nodes if node.target is KEEP] for one in (forward, backward)]
    assert [len(one) for one in made] == [1, 1]
    fused = fuse(mlp, backend="eager")
    found = torch.autograd.grad(fused(*inputs).square().sum(), inputs)
    expected = torch.autograd.grad(mlp(*inputs).square().sum(), inputs)
    torch.testing.assert_close(found, expected)


def test_other_masks_stay() -> None:
    graph = torch.fx.Graph()
    seed, other = graph.placeholder("seed"), graph.placeholder("other")
    calls = [
        graph.call_function(KEEP, (one, None, rows, first_group, 3, 9), {"again": again})
        for one, rows, first_group, again in (
            (seed, 4, 0, False),
            (seed, 4, 0, True),
            (seed, 4, 1, True),
            (seed, 5, 0, False),
            (other, 4, 0, False),
            (seed, 4, 0, True),
        )
    ]
    graph.output(tuple(calls))
    module = one_mask_pass(torch.fx.GraphModule(torch.nn.Module(), graph))
    (returned,) = module.graph.output_node().args
    # The last one is far from its equals, and the first would wait for it in memory.
    assert len(set(returned)) == 5
    assert returned[0] is returned[1]
    assert torch.equal(module(SEED, SEED)[1], KEEP(SEED, None, 4, 0, 3, 9))
