"""`fuse(backend="nvfuser")`: layers, ops, mutation, views, the ops that torch runs, and nvFuser's failures."""

import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers import errors, ops
from fuselayers.partition import FallbackWarning, explain, fuse, saved_bytes
from fuselayers.testing import DTYPES, assert_as_good_as
from tests.ops.cases import CASES, EVERY_DAY
from tests.ops.contract import seed_of, tensors
from tests.partition.compilers.nvfuser.build_definitions import build
from tests.partition.compilers.nvfuser.interpreter import StandIn

ROWS_AND_COLUMNS = (6, 20)  # the mask's last group of eight columns is cut off


def wave(x: Tensor) -> Tensor:
    return x.sin().cos() * 2


def fused(fn: Any = wave, **options: Any) -> Any:
    return fuse(fn, backend="nvfuser", fallback=(), **options)


@pytest.mark.parametrize("norm_first", [False, True])
def test_in_a_transformer_layer_torch_runs_matmuls_and_attention_alone(norm_first: bool, on_the_cpu: StandIn) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=norm_first)
    x, results = torch.randn(2, 5, 16, requires_grad=True), []
    for module in (layer, fused(layer)):
        out = module(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
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
    assert_as_good_as(fused(FUNCTIONS[name]), FUNCTIONS[name], tensors((8, 8)))
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


# Each op once, in one of the dtypes in turn: no rule depends on the op, and regions cast half precision at their edges.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, DTYPES[number % 3]) for number, name in enumerate(EVERY_DAY)],
    ids=str,
)
def test_an_op_has_the_values_of_plain_torch(name: str, dtype: torch.dtype, on_the_cpu: StandIn) -> None:
    case = CASES[name]
    form = fused(partial(case.op, backend="eager", **case.options))
    inputs = tensors(*case.shapes(ROWS_AND_COLUMNS), dtype=dtype)
    assert_as_good_as(form, partial(case.reference, **case.options), inputs)
    # Forward and backward. A region of a single op, as the sum with a bias, is left to torch.
    assert on_the_cpu.executions >= (0 if name == "bias" else 2)


def test_a_loss_and_rotary_positions(on_the_cpu: StandIn) -> None:
    target, angle = torch.arange(6), torch.linspace(0, 1, 20).view(5, 4)

    def loss(logits: Tensor) -> Tensor:
        return ops.cross_entropy(logits, target, label_smoothing=0.1, z_loss=0.01, backend="eager")

    def turned(q: Tensor) -> Tensor:
        return ops.rotary(q, q * 2, angle.cos(), angle.sin(), backend="eager")[1]

    for fn, shape in ((loss, (6, 20)), (turned, (2, 3, 5, 8))):
        assert_as_good_as(fused(fn), fn, tensors(shape))
    assert on_the_cpu.executions >= 4


@pytest.mark.parametrize("torch_random", [False, True])
def test_masks_are_those_of_every_backend(torch_random: bool, on_the_cpu: StandIn) -> None:
    def drops(x: Tensor) -> Tensor:
        return F.dropout(ops.dropout(x.exp(), 0.5, seed=seed_of()), 0.5).sin() * 2

    x = torch.randn(6, 20, requires_grad=True)
    results = []
    for backend in ("nvfuser", "eager"):
        torch.manual_seed(5)
        y = fuse(drops, backend=backend, fallback=(), torch_random=torch_random)(x)
        results.append((y, *torch.autograd.grad(y.sum(), x)))
    torch.testing.assert_close(results[0], results[1])
    assert on_the_cpu.executions >= 2


def test_a_cut_saves_the_bytes_that_explain_counts_as_with_inductor(on_the_cpu: StandIn) -> None:
    case = CASES["bias_dropout_residual_rms_norm, pre"]
    fn = partial(case.op, backend="eager", **case.options)
    inputs = [tensor.requires_grad_() for tensor in tensors(*case.shapes(ROWS_AND_COLUMNS))]
    saved = saved_bytes(fused(fn), *inputs)
    for backend in ("nvfuser", "inductor"):
        assert explain(fn, *inputs, backend=backend).totals["this"].saved_bytes == saved


def test_equal_layers_and_repeated_calls_share_their_definitions(on_the_cpu: StandIn) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)) for _ in range(6)]
    x, counts = torch.randn(3, 4), []
    for number in (3, 6):  # a first, a last and middle layers
        before, stack = len(on_the_cpu.defined), fused(nn.Sequential(*layers[:number]))
        for _ in range(2):
            stack(x).sum().backward()
        counts.append(len(on_the_cpu.defined) - before)
    assert 0 < counts[0] >= counts[1]


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(4, 3).t(),
        torch.randn(3, 8)[:, ::2],
        torch.randn(1, 4),
        torch.randn(4).expand(3, 4),
        torch.tensor(2.5),
    ],
    ids=["transposed", "strided", "size 1", "expanded", "rank"],
)
def test_any_layout_has_torchs_values_and_strides(other: Tensor, on_the_cpu: StandIn) -> None:
    fn = fused()
    fn(torch.randn(3, 4))
    got, expected = fn(other), wave(other)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()
    assert len(on_the_cpu.defined) == 2


def test_a_dynamic_graph_needs_one_definition(on_the_cpu: StandIn) -> None:
    fn = fused(dynamic=True)
    for rows in (2, 5, 9):
        torch.testing.assert_close(fn(x := torch.randn(rows, 4)), wave(x))
    assert (len(on_the_cpu.defined), on_the_cpu.executions) == (1, 3)


def test_a_script_makes_its_definition_again(on_the_cpu: StandIn) -> None:
    """`make test-nvfuser` builds these scripts with the real nvFuser."""
    fused(lambda x: (x.sin().transpose(0, 1) * float("inf"), x.unsqueeze(0).half().sum(1)))(torch.randn(3, 1))
    script = on_the_cpu.defined[-1].script()
    build(script, on_the_cpu)
    assert on_the_cpu.defined[-1].script() == script


def test_only_one_thread_is_in_the_first_execution_of_a_definition(
    on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvFuser's first `execute` changes the definition in Python; a second thread would see it half changed."""
    in_first, others_came = threading.Event(), threading.Event()

    class Changing(on_the_cpu.FusionDefinition):  # type: ignore[name-defined,misc]
        is_whole, runs = True, False

        def execute(self, *args: Any, **kwargs: Any) -> Any:
            if not self.runs:
                assert self.is_whole, "another thread is changing this"
                self.is_whole = False
                in_first.set()
                others_came.wait(0.2)
                self.runs = True
            return super().execute(*args, **kwargs)

    monkeypatch.setattr(on_the_cpu, "FusionDefinition", Changing)
    fn, x = fused(), torch.randn(3, 4)
    fn(torch.randn(4, 3).t())  # compiled, for another layout
    in_first.clear()
    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(fn, x)
        in_first.wait(5)
        late = threads.submit(fn, x)
        late.add_done_callback(lambda _: others_came.set())
        for future in (early, late):
            torch.testing.assert_close(future.result(), wave(x))
    assert (len(on_the_cpu.defined), on_the_cpu.executions) == (2, 3)


@pytest.mark.parametrize("fails", ["define_tensor", "execute"])
def test_torch_runs_what_nvfuser_fails_on_with_one_warning(
    fails: str, on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_the_cpu.FusionDefinition, fails, Mock(side_effect=RuntimeError("no scheduler\nand more")))
    monkeypatch.setattr(errors, "_warned", set())
    fn, x = fused(), torch.randn(3, 4, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [fn(x) for _ in range(3)]
        (gradient,) = torch.autograd.grad(results[0].sum(), x)
    assert [str(warning.message) for warning in caught if warning.category is FallbackWarning] == [
        "nvFuser failed on a part of a graph; torch runs this part from now on: RuntimeError: no scheduler"
    ]
    torch.testing.assert_close(results, [wave(x)] * 3)
    torch.testing.assert_close(gradient, -2 * x.sin().sin() * x.cos())


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried 2.00 GiB."), RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")],
    ids=["torch's own", "through the binding"],
)
def test_out_of_memory_is_raised_and_the_next_call_tries_again(
    error: Exception, on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, x = fused(), torch.randn(3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(on_the_cpu.FusionDefinition, "define_tensor", Mock(side_effect=error))
        with pytest.raises(torch.OutOfMemoryError, match=re.escape(str(error))):
            fn(x)
    torch.testing.assert_close(fn(x), wave(x))
    assert on_the_cpu.executions == 1
