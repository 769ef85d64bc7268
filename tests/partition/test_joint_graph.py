import warnings

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, nop
from torch import Tensor

from fuselayers.partition import budget, default, fuse, min_cut, saved_bytes
from fuselayers.partition.choose.partitioners import SavePolicy
from tests.partition.tracing import joint_graph_of


@pytest.mark.parametrize("rule", [default, min_cut, budget(0.5)], ids=["default", "min_cut", "budget"])
def test_a_size_traced_in_backward_is_saved_instead_of_its_tensor(rule: SavePolicy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch
        summed = aot_function(lambda x: x.sum(dim=1), nop, partition_fn=rule, dynamic=True)
        x = torch.randn(100, 50, requires_grad=True)
        assert saved_bytes(summed, x) == 0
        (got,) = torch.autograd.grad(summed(x).sin().sum(), x)
    torch.testing.assert_close(got, x.detach().sum(1, keepdim=True).cos().expand(100, 50))


def test_one_scalar_is_saved_instead_of_those_that_it_is_made_from() -> None:
    inputs = [torch.randn(3, requires_grad=True) for _ in range(4)]
    joint = joint_graph_of(lambda a, b, c, d: (a + b + c + d).cos().cos(), *inputs)
    assert joint.saved_bytes(min_cut.saved_values(joint, fused=True)) == 12
    assert joint.saved_bytes(min_cut.saved_values(joint, fused=False)) == 24  # as plain eager saves


def test_a_tuple_of_scalars_is_no_scalar() -> None:
    # nll_loss_forward returns two scalars. If the pair counted as one, its elements could not be saved or recomputed.
    logits, labels = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 1, -100, 4])
    fused = fuse(F.cross_entropy, backend="eager", fallback=())
    (got,) = torch.autograd.grad(fused(logits, labels), logits)
    torch.testing.assert_close(got, torch.autograd.grad(F.cross_entropy(logits, labels), logits)[0])


@pytest.mark.parametrize("choice", [default, min_cut], ids=["default", "min_cut"])
# The smaller two count as scalars, from which values are recomputed.
@pytest.mark.parametrize("shape", [(64,), (4,), ()])
def test_of_a_mutated_input_the_clone_is_saved(shape: tuple[int, ...], choice: SavePolicy) -> None:
    def step(x: Tensor, counts: Tensor) -> Tensor:
        before = counts.clone()
        counts.add_(1)
        return (x * before).sin()

    joint = joint_graph_of(step, torch.randn(64, 1, requires_grad=True), torch.ones(shape))
    saved = choice.saved_values(joint, fused=True)
    assert torch.ops.aten.clone.default in [node.target for node in saved]
    assert not joint.mutated_inputs & set(saved)
