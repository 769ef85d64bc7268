import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fuselayers.partition import CostModel, budget, default, fuse, machine_of, min_cut, saved_bytes
from fuselayers.partition.choose.partitioners import SavePolicy
from fuselayers.partition.compilers.inductor import cache_key
from tests.processes import run


def test_the_cache_key_names_everything_that_changes_the_cut() -> None:
    cpu = CostModel(machine_of("cpu"))
    rules = [
        default,
        min_cut,
        budget(0.5),
        budget(0.25),
        budget(1),
        budget(1.0),
        budget(1024),
        SavePolicy("min_cut", cost=cpu),
        SavePolicy("min_cut", cost=dataclasses.replace(cpu, memory_price=2.0)),
        SavePolicy("min_cut", cost=dataclasses.replace(cpu, fused=False)),
        SavePolicy("min_cut", cost=dataclasses.replace(cpu, machine=machine_of("cuda"))),
        budget(0.5, cost=cpu),
    ]
    keys = [cache_key(rule, torch_random=random) for rule in rules for random in (False, True)]
    assert len(set(keys)) == 2 * len(rules)


def test_the_cache_key_names_the_library_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for prefers in (False, True):
        monkeypatch.setattr(
            sys.modules["fuselayers.ops.linear"], "_machine_prefers_onednn", lambda prefers=prefers: prefers
        )
        keys.add(cache_key(min_cut, torch_random=False))
    with torch.backends.mkldnn.flags(enabled=False):
        assert cache_key(min_cut, torch_random=False) in keys
    assert len(keys) == 2


@pytest.mark.usefixtures("inductor_runs_op_by_op")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_machine_is_read_once_for_a_graph(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # If `fuselayers tune` wrote between two readings, the cache's key would name other prices than the cut's.
    module, files = sys.modules["fuselayers.partition.choose.machine"], []
    find: Any = vars(module)["tuned_file"]
    monkeypatch.setattr(module, "tuned_file", lambda: files.append(find()) or files[-1])
    fuse(torch.sin, backend=backend, fallback=())(torch.randn(3, requires_grad=True))
    assert len(files) == 1


class Strided(nn.Module):
    """Reads an intermediate value by strides, as torch's decomposition of a group norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 32, 1, 1))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return (x_NCHW * self.weight).sin().as_strided((2, 32, 8, 8), (2048, 64, 1, 8)).cos()


# Torch's own norm is the case that users meet; `Strided` has as_strided in any version of torch.
@pytest.mark.parametrize("layer", [nn.GroupNorm(4, 32), pytest.param(Strided(), marks=pytest.mark.slow)])
def test_a_value_that_is_read_by_strides_is_not_recomputed(layer: nn.Module) -> None:
    # On a CPU Inductor gives the input of a convolution, and what backward saves of it, other strides.
    model = nn.Sequential(layer, nn.Conv2d(32, 32, 3, padding=1))
    x_NCHW = torch.randn(2, 32, 8, 8)

    def gradients(model: Any) -> list[Tensor]:
        y_NCHW = model(x_NCHW)
        weights = torch.linspace(-1, 1, y_NCHW.numel()).view(y_NCHW.shape)
        return list(torch.autograd.grad((y_NCHW * weights).sum(), list(model.parameters())))

    fused = fuse(model, backend="inductor")
    for wanted, gradient in zip(gradients(model), gradients(fused), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)


ATTENTION_IN_FIVE_DIMENSIONS = """
import torch
import torch.nn.functional as F
from fuselayers.partition import fuse

def scaled(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)

def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

def by_hand(q, k, v):
    return ((q @ k.transpose(-2, -1)) / 2.0).softmax(-1) @ v

torch.compile(torch.sin)(torch.ones(4))  # registers Inductor's patterns
for attention in (scaled, causal, by_hand):
    def windows(*inputs):
        heads = (x.unflatten(-1, (4, 8)).transpose(-2, -3) for x in inputs)
        return attention(*heads).transpose(-2, -3).flatten(-2)

    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 16, 32, requires_grad=True) for _ in range(3)]
    fused = fuse(windows, backend="inductor", fallback=())
    results = [fn(*inputs) for fn in (windows, fused)]
    torch.testing.assert_close(results[1], results[0])
    gradients = [torch.autograd.grad(y.square().sum(), inputs) for y in results]
    torch.testing.assert_close(gradients[1], gradients[0])
"""


@pytest.mark.slow
def test_attention_in_five_dimensions() -> None:
    ended = run(ATTENTION_IN_FIVE_DIMENSIONS)
    assert ended.code == 0, ended.errors


def test_a_gradient_with_the_negative_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, incoming = torch.randn(4, 8, requires_grad=True), torch._neg_view(torch.randn(4, 8))
    expected = torch.autograd.grad(x.sin(), x, incoming)
    for _ in ("compiled", "from the cache"):
        torch.compiler.reset()
        fused = fuse(lambda x: x.sin(), backend="inductor", fallback=())
        torch.testing.assert_close(torch.autograd.grad(fused(x), x, incoming), expected)
        assert incoming.is_neg()


@pytest.mark.filterwarnings("ignore:backend 'inductor' is not used")
@pytest.mark.parametrize("grad", [False, True])
def test_a_write_into_a_part_of_an_input_whose_elements_share_memory(grad: bool) -> None:
    def scaled(x: Tensor) -> Tensor:
        x[0].mul_(2)
        return x.sum(0)

    inputs = [(torch.arange(9.0, requires_grad=grad) * 1).unfold(0, 4, 1)[:3] for _ in range(2)]
    fused = fuse(scaled, backend="inductor", fallback=("eager",))
    torch.testing.assert_close([fused(inputs[0]), inputs[0]], [scaled(inputs[1]), inputs[1]])
    assert fused.served_by == ("eager",)


# Two dimensions and a width of two: report 198119 in test_pytorch_reports.py.
@pytest.mark.slow
@pytest.mark.parametrize(("dimensions", "width"), [(1, 2), (3, 2), (2, 3)])
def test_an_average_pool_whose_last_windows_are_smaller(dimensions: int, width: int) -> None:
    pool = getattr(nn, f"AvgPool{dimensions}d")(width, 2, ceil_mode=True)
    x = torch.randn(2, 4, *[{2: 3, 3: 6}[width]] * dimensions, requires_grad=True)
    incoming = torch.randn_like(pool(x))
    fused = fuse(pool, backend="inductor", fallback=())
    torch.testing.assert_close(torch.autograd.grad(fused(x), x, incoming), torch.autograd.grad(pool(x), x, incoming))


COMPILE_ON_A_CPU = """
import torch
from fuselayers.partition import fuse

x = torch.ones(8, requires_grad=True)
for backend in ("inductor", "auto"):
    fuse(lambda x: x.sin().exp(), backend=backend)(x).sum().backward()
assert not torch.cuda.is_initialized()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_function_on_a_cpu_leaves_the_gpu_alone() -> None:
    ended = run(COMPILE_ON_A_CPU)
    assert ended.code == 0, ended.errors


@pytest.mark.slow
def test_code_of_another_partitioner_is_not_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def layer(x: Tensor) -> Tensor:
        return (x + 1).cos().cos().sin()

    def bytes_of(partition: Any) -> int:
        torch.compiler.reset()
        return saved_bytes(fuse(layer, backend="inductor", partition=partition), x)

    x = torch.randn(64, 64, requires_grad=True)
    counters.clear()
    saved = [bytes_of(partition) for partition in ("default", "min_cut", "default")]
    assert saved == [3 * x.nbytes, x.nbytes, 3 * x.nbytes]
    hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    assert hits > 0, "nothing was found in the cache the second time, so this test tests nothing"
