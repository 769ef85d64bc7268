from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def test_backward_may_run_twice() -> None:
    """The first backward does not free or overwrite the saved tensors."""
    fused = fuse(lambda x: x.exp().sin() * 2, backend="eager", partition="default", fallback=())
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


class Block(nn.Module):
    """A block of T5 (RMS norm, relative positions, a gated MLP) or of BLOOM (layer norm, ALiBi, its own GELU)."""

    def __init__(self, kind: str, dim: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.gate, self.up, self.down = nn.Linear(dim, 64), nn.Linear(dim, 64), nn.Linear(64, dim)
        self.first, self.second = (nn.RMSNorm(dim), nn.RMSNorm(dim)) if kind == "t5" else (nn.LayerNorm(dim),) * 2
        self.distances = nn.Embedding(8, heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        normed = self.first(x)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(normed).chunk(3, -1))
        places = torch.arange(tokens)
        if self.kind == "t5":
            bias = self.distances((places[:, None] - places).clamp(0, 7)).permute(2, 0, 1)
        else:
            bias = -(places[:, None] - places).abs() * torch.tensor([0.5, 0.25]).view(2, 1, 1)
        causal = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-1, -2) + bias).masked_fill(causal, -1e9).softmax(-1)
        mixed = F.dropout(weights, 0.0) @ v
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, tokens, dim)), 0.0)
        normed = self.second(x)
        hidden = F.silu(self.gate(normed)) * self.up(normed) if self.kind == "t5" else BloomGelu.apply(self.up(normed))
        return x + F.dropout(self.down(F.dropout(hidden, 0.0)), 0.0)


@pytest.mark.parametrize(("kind", "partition"), every_value(("t5", "bloom"), ("default", "min_cut")))
def test_keeps_no_more_than_plain_eager(kind: str, partition: str) -> None:
    block, x = Block(kind), torch.randn(2, 16, 32, requires_grad=True)
    fused = fuse(block, backend="eager", partition=partition, fallback=())
    assert saved_bytes(fused, x) <= saved_bytes(block, x)
    got, expected = (torch.autograd.grad(fn(x).sum(), (x, *fn.qkv.parameters())) for fn in (fused, block))
    torch.testing.assert_close(got, expected)
