"""Blocks that write in place into what a swapped layer saved: backward raises, as autograd counts the writes."""

from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components.swap import swap, unswap


class Norm(nn.Module):
    """As Llama has it: in 16 bits it saves a copy of x in float32, and no x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps)).to(dtype)


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class OfX(nn.Module):
    """A block that writes into the input of its norm."""

    rules = ("rms_norm",)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), Feedforward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(self.norm(x))
        x += y
        return x


class WithoutMLP(OfX):
    """Only the norm is replaced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if len(y):
            y = torch.tanh(y)
        x += y
        return x


class OfTheSum(OfX):
    rules = ("residual_rms_norm",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = x + torch.sin(x)
        y = torch.tanh(self.norm(s))
        s += y
        return s


def gradients(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaf = x.clone().requires_grad_()
    wanted = [leaf, *(one for one in module.parameters() if one.requires_grad)]
    found = torch.autograd.grad(module(leaf * 1).float().square().sum(), wanted, allow_unused=True)
    return tuple(one for one in found if one is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [3, pytest.param(9000, marks=pytest.mark.slow)])  # many rows run as compiled code
@pytest.mark.parametrize("kind", [OfX, WithoutMLP, OfTheSum])
def test_backward_raises_after_a_write(kind: Any, rows: int, dtype: torch.dtype) -> None:
    module, x = kind().to(dtype), torch.randn(rows, 8, dtype=dtype)
    wanted = gradients(module, x)
    report = swap(module, level="layers", verify=False)
    assert kind.rules in [site.rules for site in report.sites]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(module, x)
    unswap(module)
    swap(module, ["mlp"], level="layers", verify=False)
    for one, other in zip(gradients(module, x), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.02 * other.abs().max().item())
