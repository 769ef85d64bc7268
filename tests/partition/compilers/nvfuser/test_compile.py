"""`fuse(backend="nvfuser")`: mutation, views, gradients, the ops that torch runs, and a real GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.partition import explain, fuse, min_cut, saved_bytes
from tests.partition.compilers.nvfuser.accuracy import assert_accurate, run
from tests.partition.compilers.nvfuser.interpreter import StandIn
from tests.partition.compilers.nvfuser.library import CASES


def fused(fn: Any, **options: Any) -> Any:
    return fuse(fn, backend="nvfuser", fallback=(), **options)


def test_torch_runs_matmuls_and_attention(on_the_cpu: StandIn) -> None:
    """In a transformer layer, regions stand between the matmuls and the attention."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
    x = torch.randn(2, 5, 16)
    wide = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
    wide.load_state_dict(layer.state_dict())
    wide.double()
    ran = []
    for module, given in ((fused(layer), x), (layer, x), (wide, x.double())):
        given = given.clone().requires_grad_()
        ran.append(run(module, [given], incoming=torch.float32))
    assert_accurate(*ran)
    scripts = [one.script() for one in on_the_cpu.defined]
    assert len(scripts) >= 4
    assert not any(word in script for script in scripts for word in ("matmul", "linear", "sdpa"))


def test_an_input_is_mutated_in_place(on_the_cpu: StandIn) -> None:
    def fill(x: Tensor, y: Tensor) -> Tensor:
        before = x.sin().cos()
        x.add_(y.exp().tanh())
        return before * x

    x, y = torch.ones(3, 4), torch.randn(3, 4)
    result = fused(fill)(x, y)
    written = torch.ones(3, 4) + y.exp().tanh()
    torch.testing.assert_close(x, written)
    torch.testing.assert_close(result, torch.ones(3, 4).sin().cos() * written)
    assert on_the_cpu.executions == 1


def test_a_buffer_is_updated_under_gradients(on_the_cpu: StandIn) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.5).add_(x.detach().mean(0) * 0.5)  # type: ignore[operator]
            return (x - self.mean).tanh() * 2

    plain, other = Counts(), Counts()
    module = fused(other)
    x = torch.randn(3, 4, requires_grad=True)
    ran = [run(one, [x], incoming=torch.float32) for one in (module, plain)]
    torch.testing.assert_close(ran[0].all, ran[1].all)
    torch.testing.assert_close(other.mean, plain.mean)


def test_a_returned_view_of_an_input_is_a_view(on_the_cpu: StandIn) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.t(), x.sin().cos()

    x = torch.randn(3, 4)
    view, _ = fused(fn)(x)
    view.zero_()
    assert not x.any()


def test_without_gradients_only_forward_runs(on_the_cpu: StandIn) -> None:
    weight = torch.randn(4, requires_grad=True)
    fn = fused(lambda x: (x * weight).sin().cos())
    x = torch.randn(3, 4)
    with torch.no_grad():
        result = fn(x)
    assert not result.requires_grad
    torch.testing.assert_close(result, (x * weight).sin().cos().detach())
    assert on_the_cpu.executions == 1


def test_backward_may_run_twice(on_the_cpu: StandIn) -> None:
    fn = fused(lambda x: x.exp().sin() * 2, partition="default")
    x = torch.randn(64, requires_grad=True)
    with torch._functorch.config.patch(donated_buffer=True):
        fn(x).sum().backward()
        x.grad = None
        loss = fn(x).sum()
        loss.backward(retain_graph=True)
        first, x.grad = x.grad, None
        loss.backward()
    assert first is not None
    assert torch.equal(first, x.grad)


def test_a_users_partitioner_keeps_its_signature(on_the_cpu: StandIn) -> None:
    seen: list[dict[str, Any]] = []

    def cut(joint_module: Any, joint_inputs: Any, /, **options: Any) -> Any:
        seen.append(options)
        return min_cut(joint_module, joint_inputs, **options)

    x = torch.randn(3, 4, requires_grad=True)
    fused(lambda x: x.sin().cos(), partition=cut)(x).sum().backward()
    assert [set(options) >= {"num_fwd_outputs"} and "compiler" not in options for options in seen] == [True]


def test_torch_runs_unsupported_ops_in_the_same_graph(on_the_cpu: StandIn) -> None:
    def fn(x: Tensor, table: Tensor) -> Tensor:
        sorted_x = (x.sin() * 2).sort(-1).values
        return (F.embedding(torch.arange(3), table) + sorted_x.cumsum(-1)).tanh() * 2

    inputs = [torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)]
    ran = [run(one, inputs, incoming=torch.float32) for one in (fused(fn), fn)]
    torch.testing.assert_close(ran[0].all, ran[1].all)
    assert on_the_cpu.executions >= 2


def test_autocast_is_in_the_graph(on_the_cpu: StandIn) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.gelu(x @ w).float() * 2

    inputs = [torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)]
    ran = [run(one, inputs, incoming=torch.float32) for one in (fused(fn), fn)]
    for got, expected in zip(ran[0].all, ran[1].all, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert "DataType.BFloat16" in on_the_cpu.defined[0].script()


def test_explain_tells_what_is_saved(on_the_cpu: StandIn) -> None:
    fn = fused(CASES["bias_dropout_residual_layer_norm-prenorm"].fn)
    inputs = CASES["bias_dropout_residual_layer_norm-prenorm"].inputs(torch.float32)
    report = explain(fn, *inputs)
    assert report.backend == "nvfuser"
    assert report.totals["this"].saved_bytes == saved_bytes(fn, *inputs)


on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("nvfuser_direct") is None,
    reason="needs a CUDA device and nvfuser_direct",
)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_an_op_on_a_gpu_has_the_values_of_plain_torch(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs = [one.detach().cuda().requires_grad_(one.requires_grad) for one in case.inputs(dtype)]
    wide = [one.detach().double().requires_grad_() if one.requires_grad else one for one in inputs]
    ran = [
        run(fn, given, incoming=dtype) for fn, given in ((fused(case.fn), inputs), (case.fn, inputs), (case.fn, wide))
    ]
    assert_accurate(*ran)
