"""Fused graphs multiply by oneDNN on a machine that prefers it."""

import sys
from typing import Any

import pytest
import torch
import torch._dynamo.config
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


def test_a_wide_gradient_is_not_copied() -> None:
    head, x = nn.Linear(72, 513, bias=False), torch.randn(400, 72)
    fused = fuse(head, backend="inductor", fallback=())
    backward = compiled_code(fused, x).rpartition("def call")[2]
    assert backward.count(ONEDNN) == 1
    assert "empty_strided_cpu((513, 400)" not in backward  # a copy of dy^T
    assert "empty_strided_cpu((72, 400)" in backward  # x^T
    got, wanted = (torch.autograd.grad(model(x).sin().sum(), head.weight) for model in (fused, head))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_factor_that_inductor_writes_into_a_wider_tensor() -> None:
    # Inductor computes both parts of a `cat` in its memory. oneDNN would take 200 times as long for rows of a part.
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        left = b.sin()
        return torch.cat((left, b.cos()), 1), a @ left

    a, b = torch.randn(200, 128), torch.randn(128, 192)
    got, code = run_and_get_code(fuse(function, backend="inductor", fallback=()), a, b)
    torch.testing.assert_close(got, function(a, b), rtol=1e-4, atol=1e-4)
    factor = "\n".join(code).partition(ONEDNN)[2].partition(", None, 'none'")[0]
    assert "384" not in factor, factor


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_sums_over_no_rows(backend: str) -> None:
    x, weight = torch.randn(400, 128), torch.randn(128, 192, requires_grad=True)
    fused = fuse(lambda x, chosen, weight: (x[chosen] @ weight).sin(), backend=backend, fallback=())
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for share in (1, 0):  # oneDNN cannot sum over no rows
            (dweight,) = torch.autograd.grad(fused(x, torch.rand(400) < share, weight).sum(), weight)
    assert torch.equal(dweight, torch.zeros(128, 192))


def test_a_strided_bias_is_copied() -> None:
    a, b, bias = torch.randn(200, 128), torch.randn(128, 192), torch.randn(192, 2)[:, 0]
    for backend in ("inductor", "eager"):
        fused = fuse(lambda a, b, bias: torch.addmm(bias, a, b).sin(), backend=backend, fallback=())
        torch.testing.assert_close(fused(a, b, bias), torch.addmm(bias, a, b).sin(), rtol=1e-4, atol=1e-4)


def targets(a: Tensor, b: Tensor) -> list[Any]:
    """Return the ops of the graph of a product after the pass."""
    module = torch.fx.experimental.proxy_tensor.make_fx(torch.mm, tracing_mode="fake")(a, b)
    return [node.target for node in onednn_products_pass(module).graph.nodes if node.op == "call_function"]


def test_the_pass_leaves_a_graph_alone_where_mkl_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(200, 128), torch.randn(128, 192)
    assert targets(a, b) == targets(a, b.t().contiguous().t()) == [PRODUCT_OP]
    for strided in (torch.randn(128, 384)[:, :192], torch.randn(319).unfold(0, 192, 1), b[:1].expand(128, 192)):
        assert targets(a, strided) == [torch.ops.aten.mm.default]
    monkeypatch.setattr(linear_module, "_machine_prefers_onednn", lambda: False)
    assert targets(a, b) == [torch.ops.aten.mm.default]
