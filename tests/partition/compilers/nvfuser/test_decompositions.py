"""Functions that are decomposed run in nvFuser whole, forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.partition import fuse
from fuselayers.partition.compilers.nvfuser.decompositions import nvfuser_decompositions
from fuselayers.partition.compilers.nvfuser.definitions import Region
from tests.partition.compilers.nvfuser.accuracy import assert_accurate, run
from tests.partition.compilers.nvfuser.interpreter import StandIn

ACTIVATIONS = F.gelu, F.leaky_relu, F.relu, torch.sigmoid, F.silu, F.softplus, torch.tanh, F.tanhshrink
# Each stands between two products, so that the region has two ops at least.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "activations": lambda x: sum((activation(x * 1.5) for activation in ACTIVATIONS), x) * 2,
    "gelu_tanh": lambda x: F.gelu(x * 1.5, approximate="tanh") * 2,
    "threshold": lambda x: F.threshold(x * 2, 0.1, 3.0) * 2,
    "softmax": lambda x: F.softmax(x * 2, -1) * 2,
    "log_softmax": lambda x: F.log_softmax(x * 2, 0) * 2,
    "logsumexp": lambda x: (x * 2).logsumexp(-1) * 2,
    "layer_norm": lambda x: F.layer_norm(x * 2, (8,)) * 2,
    "rms_norm": lambda x: F.rms_norm(x * 2, (8,)) * 2,
    "mean": lambda x: (x * 2).mean((0, 1), keepdim=True) * x,
    "masked_fill": lambda x: (x * 2).masked_fill(x > 0, float("-inf")).exp() * 2,
    "rsub": lambda x: (1 - x * 2) * 2,
    "zeros_like": lambda x: (torch.zeros_like(x) + x.sin()) * 2,
}
# Only their shapes are used.
_HARMLESS = {"empty_like", "detach"}


@pytest.fixture
def left_to_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that stay outside of regions, in every graph that is compiled."""
    module = sys.modules["fuselayers.partition.compilers.nvfuser.compile"]
    left: list[str] = []
    original: Callable[..., Any] = module.with_regions  # type: ignore[attr-defined]

    def noting(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        cut: torch.fx.GraphModule = original(graph_module)
        calls = [node.target for node in cut.graph.nodes if node.op == "call_function"]
        left.extend(target.overloadpacket.__name__ for target in calls if isinstance(target, torch._ops.OpOverload))
        assert any(isinstance(target, Region) for target in calls)
        return cut

    monkeypatch.setattr(module, "with_regions", noting)
    return left


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_fused_whole(name: str, on_the_cpu: StandIn, left_to_torch: list[str]) -> None:
    fn = FUNCTIONS[name]
    x = torch.randn(8, 8, requires_grad=True)
    fused = run(fuse(fn, backend="nvfuser", fallback=()), [x], incoming=torch.float32)
    wide = run(fn, [x.detach().double().requires_grad_()], incoming=torch.float32)
    assert_accurate(fused, run(fn, [x], incoming=torch.float32), wide, scale=4)
    assert set(left_to_torch) - _HARMLESS == set()


def test_ops_of_nvfuser_or_torch_are_not_decomposed() -> None:
    aten = torch.ops.aten
    whole = {aten.exp, aten.silu, aten.var_mean, aten.sum, aten.mm, aten.embedding, aten.native_dropout, aten.sort}
    assert not whole & {target.overloadpacket for target in nvfuser_decompositions()}
