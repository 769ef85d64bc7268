"""torch's tracers record fused models and swapped blocks as they record plain ones. The old ONNX export traces too."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fuselayers import fuse, swap


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scale(x)


@fuse(backend="eager")
def scale(x: Tensor) -> Tensor:
    return x * 2 + 1


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = nn.ModuleList([Block(), Block()]), Scale()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.scale(x)


def fused(model: nn.Module) -> nn.Module:
    return fuse(model, backend="eager")


def swapped(model: nn.Module) -> nn.Module:
    assert swap(model, level="blocks", backend="eager", verify=False).sites
    return model


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("change", [fused, swapped])
@pytest.mark.parametrize(
    "trace",
    [
        lambda model, x: torch.jit.trace(model, (x,)),
        lambda model, x: torch.fx.symbolic_trace(model),
        lambda model, x: make_fx(model)(x),
    ],
    ids=["jit.trace", "symbolic_trace", "make_fx"],
)
def test_a_tracer_records_the_original(trace: Any, change: Callable[[nn.Module], nn.Module], train: bool) -> None:
    plain = Stack().train(train)
    model = change(copy.deepcopy(plain))
    x, other = torch.randn(2, 4, 8)
    called = model(x)  # what is compiled already is not traced either
    traced = trace(model, x)
    torch.testing.assert_close(called, plain(x))
    torch.testing.assert_close(traced(other), plain(other))
