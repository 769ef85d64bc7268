from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.layers import LAYERS
from fuselayers.partition import fuse, saved_bytes
from fuselayers.testing import results
from tests.selection import every_value


def test_runs_the_same_ops_in_the_same_order() -> None:
    """The values are bitwise those of plain torch."""

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x @ weight).softmax(-1)

    inputs = torch.randn(16, 32), torch.randn(32, 32)
    got, expected = results(fuse(layer, backend="eager", fallback=()), inputs), results(layer, inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_backward_may_run_twice(backend: str) -> None:
    """The first backward does not free or overwrite the saved tensors."""
    fused = fuse(lambda x: x.exp().sin() * 2, backend=backend, partition="default", fallback=())
    x = torch.randn(64, requires_grad=True)
    with torch._functorch.config.patch(donated_buffer=True):
        fused(x).sum().backward()  # compiles backward without retain_graph
        out = fused(x).sum()
        (first,) = torch.autograd.grad(out, x, retain_graph=True)
        (second,) = torch.autograd.grad(out, x)
    assert torch.equal(first, second)


class Projected(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.linear(x.transpose(1, 2)), 0.1).transpose(1, 2)


@pytest.mark.parametrize(("transposed", "torch_random"), every_value((False, True), (True, False)))
def test_views_of_values_with_other_strides_than_traced(transposed: bool, torch_random: bool) -> None:
    block, shape = Projected(8), (2, 8, 6)
    x = (torch.randn(shape[::-1]).permute(2, 1, 0) if transposed else torch.randn(shape)).requires_grad_()
    fused = fuse(block, backend="eager", fallback=(), torch_random=torch_random)
    # Without torch's masks, the reference is the fused block on contiguous tensors, which has the same masks.
    reference, x_of_reference = (block, x) if torch_random else (fused, x.detach().contiguous().requires_grad_())
    for incoming in (torch.randn(shape), torch.randn(shape[::-1]).permute(2, 1, 0)):
        results = []
        for fn, source, tangent in ((fused, x, incoming), (reference, x_of_reference, incoming.contiguous())):
            torch.manual_seed(1)
            out = fn(source)
            results.append((out, *torch.autograd.grad(out, (source, *block.parameters()), tangent)))
        torch.testing.assert_close(results[0], results[1])


class BloomGelu(torch.autograd.Function):
    """The tanh form of GELU with a handwritten backward, as in BLOOM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        tanh = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return incoming * (0.5 * x * ((1 - tanh * tanh) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + tanh))


@pytest.mark.parametrize(("name", "partition"), every_value((*LAYERS, "BLOOM's GELU"), ("default", "min_cut")))
def test_keeps_no_more_than_plain_eager(name: str, partition: str) -> None:
    """Dropout with p = 0 returns its input in plain eager."""
    x = torch.randn(2, 16, 32, requires_grad=True)
    layer = LAYERS[name].make(32, 2, dropout=0.0) if name in LAYERS else lambda x: BloomGelu.apply(x * 2)
    fused: Any = fuse(layer, backend="eager", partition=partition, fallback=())
    assert saved_bytes(fused, x) <= saved_bytes(layer, x)
    inputs = (x, *layer.parameters()) if isinstance(layer, nn.Module) else (x,)
    got, expected = (torch.autograd.grad(fn(x).sum(), inputs) for fn in (fused, layer))
    torch.testing.assert_close(got, expected)
