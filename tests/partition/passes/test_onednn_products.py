"""Fused graphs multiply by oneDNN on a machine that prefers it."""

import sys
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from fuselayers._torch.onednn import has_onednn
from fuselayers.ops.linear import PRODUCT_OP
from fuselayers.partition import fuse
from fuselayers.partition.passes import onednn_products_pass
from fuselayers.testing import results

linear_module: Any = sys.modules["fuselayers.ops.linear"]
ONEDNN = "torch.ops.mkldnn._linear_pointwise.default("

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def prefers_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_machine_prefers_onednn", lambda: True)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def compiled_code(model: nn.Module, x: Tensor) -> str:
    def step() -> None:
        model(x).square().sum().backward()

    return "\n".join(run_and_get_code(step)[1])


@pytest.mark.parametrize("partition", ["min_cut", "default"])
def test_inductor(partition: str) -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(2, 100, 128, requires_grad=True)
    fused = fuse(model, backend="inductor", fallback=(), partition=partition)
    # Two products forward, and two for each of them backward: none is left to MKL, and no operand is copied for it.
    code = compiled_code(fused, x)
    assert code.count(ONEDNN) == 6
    assert "extern_kernels." not in code
    got, wanted = (
        [model(x), *torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()])] for model in (fused, model)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)


def test_the_eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = linear_module.onednn_product
    monkeypatch.setattr(linear_module, "onednn_product", lambda *factors: calls.append(factors) or run(*factors))
    x, weight = torch.randn(200, 128), torch.randn(128, 192)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).sin()

    torch.testing.assert_close(
        results(fuse(function, backend="eager"), (x, weight)), results(function, (x, weight)), rtol=1e-4, atol=1e-4
    )
    assert len(calls) >= 3


def test_sizes_that_change() -> None:
    weight = torch.randn(128, 192, requires_grad=True)
    fused = fuse(lambda x, weight: (x @ weight).sin(), backend="inductor", fallback=())
    for rows in (200, 310, 420, 3, 0):
        x = torch.randn(rows, 128)
        y = fused(x, weight)
        torch.testing.assert_close(y, (x @ weight).sin(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            torch.autograd.grad(y.sum(), weight)[0], x.t() @ (x @ weight).cos(), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("setting", ["disabled", "small", "float64", "scaled", "a bias for each row", "cpp_wrapper"])
def test_other_products_stay(setting: str) -> None:
    dtype = torch.float64 if setting == "float64" else torch.float32
    a, b = torch.randn(2 if setting == "small" else 200, 128, dtype=dtype), torch.randn(128, 192, dtype=dtype)
    bias = torch.randn(200, 1) if setting == "a bias for each row" else torch.randn(192, dtype=dtype)

    def function(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, a, b, alpha=2 if setting == "scaled" else 1).sin()

    fused = fuse(function, backend="inductor", fallback=())
    with (
        torch.backends.mkldnn.flags(enabled=setting != "disabled"),
        torch._inductor.config.patch(cpp_wrapper=setting == "cpp_wrapper"),
    ):
        y, code = run_and_get_code(fused, a, b, bias)
    assert ONEDNN not in "\n".join(code)
    torch.testing.assert_close(y, function(a, b, bias), rtol=1e-4, atol=1e-4)


def test_a_strided_bias_is_copied() -> None:
    a, b, bias = torch.randn(200, 128), torch.randn(128, 192), torch.randn(192, 2)[:, 0]
    for backend in ("inductor", "eager"):
        fused = fuse(lambda a, b, bias: torch.addmm(bias, a, b).sin(), backend=backend, fallback=())
        torch.testing.assert_close(fused(a, b, bias), torch.addmm(bias, a, b).sin(), rtol=1e-4, atol=1e-4)


def test_the_pass_leaves_a_graph_alone_where_mkl_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> Any:
        x = torch.randn(200, 128)
        module = torch.fx.experimental.proxy_tensor.make_fx(torch.mm, tracing_mode="fake")(x, torch.randn(128, 192))
        return [node.target for node in onednn_products_pass(module).graph.nodes if node.op == "call_function"]

    assert traced() == [PRODUCT_OP]
    monkeypatch.setattr(linear_module, "_machine_prefers_onednn", lambda: False)
    assert traced() == [torch.ops.aten.mm.default]
