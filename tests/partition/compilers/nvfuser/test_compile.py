"""`fuse(backend="nvfuser")`: layers, mutation, views, the ops that torch runs."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.partition import fuse
from tests.partition.compilers.nvfuser.interpreter import StandIn


def fused(fn: Any, **options: Any) -> Any:
    return fuse(fn, backend="nvfuser", fallback=(), **options)


def assert_same_step(plain: nn.Module, x: Tensor, **tolerance: Any) -> None:
    results = []
    for module in (plain, fused(copy.deepcopy(plain))):
        out = module(leaf := x.clone().requires_grad_())
        results.append((out, *torch.autograd.grad(out.float().square().sum(), [leaf, *module.parameters()])))
    torch.testing.assert_close(results[1], results[0], **tolerance)


@pytest.mark.parametrize("norm_first", [False, True])
def test_in_a_transformer_layer_torch_runs_matmuls_and_attention_alone(norm_first: bool, on_the_cpu: StandIn) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=norm_first)
    assert_same_step(layer, torch.randn(2, 5, 16), rtol=1e-4, atol=1e-5)
    scripts = [definition.script() for definition in on_the_cpu.defined]
    assert len(scripts) >= 4
    assert not any(word in script for script in scripts for word in ("matmul", "linear", "sdpa"))


# Each op is decomposed, and must fuse whole with the products around it, forward and backward.
FUNCTIONS = {
    "gelu": lambda x: F.gelu(x * 1.5, approximate="tanh") + F.silu(x * 2) * F.relu(x * 3),
    "softmax": lambda x: F.softmax(x * 2, -1) + F.log_softmax(x * 2, 0) * 2 + (x * 2).logsumexp(-1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x * 2, (8,)) + F.rms_norm(x * 2, (8,)) * 2,
    "masked_fill": lambda x: (x * 2).masked_fill(x > 0, float("-inf")).exp() * 2,
    "cat": lambda x: torch.cat([x * 2, x.exp()], 1).sum(0) * 2,
    "views": lambda x: (x.sin().t().unsqueeze(0).expand(3, -1, -1).squeeze(0).reshape(3, 64) * 2).cos(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_runs_whole_in_few_regions(name: str, on_the_cpu: StandIn) -> None:
    fn, x = FUNCTIONS[name], torch.randn(8, 8, requires_grad=True)
    got, expected = fused(fn)(x), fn(x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(out.square().sum(), x) for out in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert 1 <= on_the_cpu.executions <= 4


def test_half_precision_is_cast_once_on_reading_and_compared_with_the_rounded_number(on_the_cpu: StandIn) -> None:
    x = torch.tensor([0.1, 0.2, 0.3]).bfloat16()
    got = fused(lambda x: (x <= 0.1, (x + 1).float().bfloat16() * x))(x)
    torch.testing.assert_close(got[0], x <= 0.1)
    torch.testing.assert_close(got[1].float(), (x.float() + 1) * x.float(), rtol=2**-8, atol=0)
    casts = [line for line in on_the_cpu.defined[0].script().splitlines() if "cast" in line]
    assert casts == ["t1 = fd.ops.cast(t0, DataType.Float)", casts[-1]]


def test_mutations_views_and_unsupported_ops_are_torchs(on_the_cpu: StandIn) -> None:
    def fn(x: Tensor, y: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        before = x.sin().cos()
        x.add_(y.exp().tanh())
        turned = (x * 2).cos().transpose(0, 1)
        sorted_x = (x.sin() * 2).sort(-1).values
        embedded = (F.embedding(torch.arange(3), table) + sorted_x.cumsum(-1)).tanh() * 2
        return x.t(), before * x, turned, turned.exp(), embedded

    values = torch.ones(3, 4), torch.randn(3, 4), torch.randn(5, 4)
    results = []
    for form in (fn, fused(fn)):
        inputs = [value.clone() for value in values]
        results.append((form(*inputs), inputs))
    torch.testing.assert_close(results[1], results[0])
    view, x = results[1][0][0], results[1][1][0]
    view.zero_()
    assert not x.any()
    assert on_the_cpu.executions >= 2
    assert not fused(lambda x: x.sin().cos())(torch.ones(0, 3)).any()


def test_a_view_that_torch_reads_is_made_outside_of_a_region(on_the_cpu: StandIn) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin().cos().sum(1, keepdim=True) * 2).expand(4, 4) @ y

    x, y = torch.randn(4, 8), torch.randn(4, 4)
    torch.testing.assert_close(fused(fn)(x, y), fn(x, y))
    assert "expand" not in on_the_cpu.defined[0].script()


def test_a_region_reads_an_input_before_torch_overwrites_it(on_the_cpu: StandIn) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        before = x.sin().cos() * 2
        x.copy_(y @ y)
        return before

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    expected = x.sin().cos() * 2
    torch.testing.assert_close(fused(fn)(x, y), expected)
    torch.testing.assert_close(x, y @ y)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint8, torch.int64])
def test_other_dtypes_are_torchs(dtype: torch.dtype, on_the_cpu: StandIn) -> None:
    x = torch.tensor([3, 2**24 + 1 if dtype is torch.int64 else 5]).to(dtype)

    def fn(x: Tensor) -> Tensor:
        return ((x + 1) * 2).relu() if not dtype.is_complex else (x.sin() * 2).sin()

    assert torch.equal(fused(fn)(x), fn(x))
