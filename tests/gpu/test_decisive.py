"""The most important checks on a GPU, which `make gpu` runs first. Each takes less than a second of the GPU.

Checks that do not need the GPU itself run in Triton's interpreter too.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers import ops
from fuselayers.cli.tune import prices
from fuselayers.components import FusedMLP
from fuselayers.partition import fuse, machine_of
from fuselayers.testing import assert_as_good_as
from tests.cuda_graphs import check_cuda_graph
from tests.ops.contract import DEVICE, seed_of, tensors

pytestmark = pytest.mark.kernels
ON_A_GPU = DEVICE.type == "cuda"
on_a_gpu = pytest.mark.skipif(not ON_A_GPU, reason="needs a GPU")
# The larger size fills a GPU. The interpreter takes milliseconds for each program.
ROWS, WIDTH = (8192, 4096) if ON_A_GPU else (9, 264)
FORMS = {"kernel": "triton", "formula": "eager"}


def kept(x: Tensor, drop: Callable[..., Tensor] = ops.dropout, **options: Any) -> tuple[Tensor, Tensor]:
    """The masks of a forward and of its backward."""
    x = x.clone().requires_grad_()
    y = drop(x, 0.3, **options)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return y != 0, x.grad != 0


def test_masks_are_equal() -> None:
    """The kernel, the formula op by op, and compiled code make the same masks."""
    # With Triton's interpreter, a C++ compiler would add nothing to the test.
    compiled = torch.compile(kept, fullgraph=False, backend="inductor" if ON_A_GPU else "aot_eager")
    x = torch.ones(min(ROWS, 1024), WIDTH, device=DEVICE)
    masks = {name: kept(x, seed=seed_of(), backend=backend) for name, backend in FORMS.items()}
    masks["compiled"] = compiled(x, seed=seed_of())
    for backend in ("inductor", "triton") if ON_A_GPU else ("eager",):
        fused = fuse(ops.dropout, backend=backend, fallback=())
        masks[f"fused by {backend}"] = kept(x, fused, seed=seed_of())
    first = masks["kernel"][0]
    assert 0.65 < first.float().mean().item() < 0.75
    for name, both in masks.items():
        for mask in both:
            assert torch.equal(mask, first), name


@on_a_gpu
def test_a_step_is_captured_in_a_cuda_graph() -> None:
    inputs = tensors((257, 513), (257, 513), (513,))
    check_cuda_graph(_sum_and_norm, _sum_and_norm_of_torch, inputs)


def _sum_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return ops.residual_layer_norm(x, residual, weight=weight)


def _sum_and_norm_of_torch(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, weight.shape, weight), total


def test_prices_are_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stated prices are those of an H200; other GPUs of these years are within a factor of six."""
    stated = machine_of(DEVICE.type)
    monkeypatch.setattr(prices, "SIZES_ON_A_CPU", (1 << 18, 128))
    measured = prices.measure(DEVICE)
    factor = 6.0 if ON_A_GPU else 1e5  # the figures of a busy CPU vary
    for name in ("bandwidth", "flop_rate", "low_precision_flop_rate", "vector_flop_rate", "kernel_seconds"):
        print(f"{name}: {getattr(measured, name):.3g}, stated {getattr(stated, name):.3g}")
        assert 1 / factor < getattr(measured, name) / getattr(stated, name) < factor, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradients_of_a_norm(dtype: torch.dtype) -> None:
    x, weight, bias = tensors((ROWS, WIDTH), (WIDTH,), (WIDTH,), dtype=dtype)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.layer_norm(x, weight=weight, bias=bias, backend="triton")

    assert_as_good_as(norm, lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias), [x, weight, bias])


@on_a_gpu
def test_a_kernel_runs_on_the_current_stream() -> None:
    """Also a kernel that another stream has launched before."""
    x = torch.zeros(ROWS, WIDTH, device=DEVICE)
    gate = torch.ones_like(x)
    ops.gated_activation(x, gate, activation="relu")
    torch.cuda.synchronize()
    side: Any = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # cycles, some 60 ms
        x.fill_(2.0)
        y = ops.gated_activation(x, gate, activation="relu")
    side.synchronize()
    assert y.eq(2.0).all()


def test_ddp_of_one_rank() -> None:
    """The hooks of DDP see the gradients of kernels, and the gradients equal those without DDP."""
    import torch.distributed as dist

    if not dist.is_available():
        pytest.skip("this torch was built without torch.distributed")
    layer: nn.Module = FusedMLP(64, dropout=0.2).to(DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group("nccl" if ON_A_GPU else "gloo", init_method=store, rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(layer))
            gradients = []
            for model in (layer, wrapped):
                torch.manual_seed(3)
                model(torch.ones(33, 64, device=DEVICE)).square().sum().backward()
                gradients.append([parameter.grad for parameter in model.parameters()])
            torch.testing.assert_close(gradients[1], gradients[0])
            del wrapped
        finally:
            dist.destroy_process_group()


def test_float16_does_not_overflow_inside_a_kernel() -> None:
    """Sums of squares of large numbers would be infinite in float16. An output beyond the range is infinite."""
    x = torch.full((5, WIDTH), 60000.0, dtype=torch.float16, device=DEVICE)
    x[:, ::2] *= -1
    weight = torch.ones(WIDTH, dtype=torch.float16, device=DEVICE)
    y = ops.layer_norm(x, weight=weight, bias=torch.zeros_like(weight), backend="triton")
    torch.testing.assert_close(y, x.sign())
    total = ops.bias_dropout_residual(x, x, backend="triton")
    assert total.isinf().all()
    assert torch.equal(total, x + x)


@on_a_gpu
def test_a_flat_tensor_beyond_the_limit_of_a_grid() -> None:
    """The limit of the second dimension: 65,535 programs, 134,215,680 elements."""
    x = torch.ones(134_215_680 + 8192, dtype=torch.float16, device=DEVICE)
    y = ops.dropout(x, 0.5, seed=seed_of())
    share = y.ne(0).float().mean().item()
    assert share == pytest.approx(0.5, abs=1e-3)
    assert y[-8192:].ne(0).float().mean().item() == pytest.approx(0.5, abs=0.05)
