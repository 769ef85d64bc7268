"""Compiled for a GPU, every op with dropout has the masks of `keep_mask`, and int8 rounds as on a CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops import Shard, draw, keep_mask
from fuselayers.ops.implementations.launch import INTERPRETED
from fuselayers.partition import fuse
from fuselayers.testing import results
from tests.generated_kernels import fake_gpu
from tests.ops.cases import CASES, Case
from tests.ops.contract import DEVICE, seed_of, tensors

pytestmark = pytest.mark.kernels

Compile = Callable[..., Callable[..., Any]]


def fused(fn: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    return fuse(fn, backend="inductor", fallback=(), fullgraph=True, dynamic=dynamic)


def compiled(fn: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    # Its backward reads the saved mask; with `fuse` backward makes the mask again.
    return torch.compile(fn, fullgraph=True, dynamic=dynamic)


slow = pytest.mark.slow
EVERYWHERE = [
    pytest.param(compile, dynamic, shapes, marks=[slow] if dynamic or compile is compiled else [])
    for compile in (fused, compiled)
    for dynamic, shapes in ((False, [(2, 64)]), (True, [(3, 64), (2, 45)]))
]


def assert_same_masks(fn: Callable[..., Any], compile: Compile, dynamic: bool, every_call: list[list[Tensor]]) -> None:
    call = compile(fn, dynamic=dynamic)
    if not INTERPRETED:
        for inputs in every_call:
            torch.testing.assert_close(results(call, [seed_of(), *inputs]), results(fn, [seed_of(), *inputs]))
        return
    with fake_gpu() as gpu:
        for inputs in every_call:
            got = results(partial(gpu.run, call), [seed_of(), *inputs])
            torch.testing.assert_close(got, results(fn, [seed_of(), *inputs]))
        assert gpu.kernels


# fuse and torch.compile trace an op differently, and each op computes the positions of its mask.
@pytest.mark.parametrize(("compile", "dynamic", "shapes"), EVERYWHERE)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "bias_dropout_residual" else [slow])
        for name, case in CASES.items()
        if "seed" in case.options and name.partition(", ")[2] in ("", "gelu", "post", "pre", "prenorm")
    ],
)
def test_every_op_has_the_same_masks(name: str, compile: Compile, dynamic: bool, shapes: list[tuple[int, ...]]) -> None:
    case: Case = CASES[name]

    def fn(seed: Tensor, *inputs: Tensor) -> Any:
        return case.op(*inputs, **{**case.options, "seed": seed})

    assert_same_masks(fn, compile, dynamic, [tensors(*case.shapes(shape)) for shape in shapes])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "bias_dropout_residual" else [slow]) for name in CASES],
)
def test_the_triton_backend_has_the_kernels_of_the_ops(name: str) -> None:
    case: Case = CASES[name]
    seeded = "seed" in case.options
    inputs = tensors(*case.shapes((2, 64)))

    def fn(seed: Tensor, *inputs: Tensor) -> Any:
        return case.op(*inputs, **{**case.options, **({"seed": seed} if seeded else {})})

    fused = fuse(fn, backend="triton", fallback=(), fullgraph=True, dynamic=False)
    wanted = results(fn, [seed_of(), *inputs])
    if not INTERPRETED:
        torch.testing.assert_close(results(fused, [seed_of(), *inputs]), wanted)
        return
    with fake_gpu() as gpu:
        torch.testing.assert_close(results(partial(gpu.run, fused), [seed_of(), *inputs]), wanted)
    forward = gpu.ops[0]
    assert len(forward) == 1, forward
    assert not {"keep_factors", "keep_mask"} & set().union(*gpu.ops)


@pytest.mark.parametrize(("compile", "dynamic", "shapes"), EVERYWHERE)
def test_masks_have_their_column(compile: Compile, dynamic: bool, shapes: list[tuple[int, ...]]) -> None:
    def fn(seed: Tensor, x: Tensor) -> Tensor:
        shard = Shard((3, 2**36 + 5), (2**20, 2**40))
        return x * keep_mask(seed, x.shape, p=0.3, shard=shard)

    assert_same_masks(fn, compile, dynamic, [[torch.ones(shape, device=DEVICE)] for shape in shapes])


def test_int8_rounds_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not bfloat16 and float8: Triton's interpreter casts to bfloat16 wrongly, and to float8 not at all."""
    x = torch.randn(9, 130, device=DEVICE)
    x[1, 3], x[2, 4], x[3, 5], x[4] = float("inf"), -float("inf"), float("nan"), 0.0
    x, y = x.requires_grad_(), torch.ones_like(x).requires_grad_()
    monkeypatch.setattr(draw, "_drawn", lambda device: torch.tensor(5, device=DEVICE))
    call, eager = (fuse(torch.mul, backend=name, fallback=(), compress="int8") for name in ("inductor", "eager"))
    (expected,) = torch.autograd.grad(eager(x, y).sum(), y)
    if INTERPRETED:
        with fake_gpu() as gpu:
            (dy,) = torch.autograd.grad(gpu.run(call, x, y).sum(), y)
            assert gpu.kernels
    else:
        (dy,) = torch.autograd.grad(call(x, y).sum(), y)
    torch.testing.assert_close(dy, expected, rtol=1e-6, atol=0, equal_nan=True)
