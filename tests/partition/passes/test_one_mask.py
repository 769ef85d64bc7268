import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.partition import fuse
from fuselayers.testing import results
from tests.partition.tracing import split_of

KEEP = torch.ops.fuselayers.keep_factors.default
SEED = torch.tensor(3)


def mlp(x: Tensor, weight: Tensor) -> Tensor:
    """Backward needs the mask twice: for the dropped value, and for its gradient."""
    return ops.bias_activation_dropout(x, activation="gelu", p=0.3, seed=SEED) @ weight


def test_backward_makes_each_mask_once() -> None:
    inputs = torch.randn(16, 24, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    forward, backward = split_of(mlp, *inputs, partition="min_cut")
    for module in (forward, backward):
        assert len(module.graph.find_nodes(op="call_function", target=KEEP)) == 1
    torch.testing.assert_close(results(fuse(mlp, backend="eager"), inputs), results(mlp, inputs))
