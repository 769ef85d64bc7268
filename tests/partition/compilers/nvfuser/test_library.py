"""Every op of the library on the nvFuser backend: values, gradients, masks, and what is saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.partition import explain, fuse, saved_bytes
from tests.partition.compilers.nvfuser.accuracy import assert_accurate, run
from tests.partition.compilers.nvfuser.interpreter import StandIn
from tests.partition.compilers.nvfuser.library import CASES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The ops with dropout are one formula with different activations and norms: each is tested in one dtype.
DROPPING = {name: DTYPES[place % 3] for place, name in enumerate(name for name, case in CASES.items() if case.drops)}
# float16 is translated as bfloat16 is, except for the scale of a loss's chunks.
RUNS = [
    pytest.param(name, dtype, marks=pytest.mark.slow if dtype == torch.float16 and "cross_entropy" not in name else ())
    for name in CASES
    for dtype in DTYPES
    if name not in DROPPING
]
RUNS += DROPPING.items()


def assert_as_plain_torch(name: str, dtype: torch.dtype, stand_in: StandIn) -> None:
    case = CASES[name]
    inputs = case.inputs(dtype)
    fused = run(fuse(case.fn, backend="nvfuser", fallback=()), inputs, incoming=dtype)
    executed = [one.executions for one in stand_in.defined]
    plain = run(case.fn, inputs, incoming=dtype)
    wide = [one.detach().double().requires_grad_() if one.requires_grad else one for one in inputs]
    assert_accurate(fused, plain, run(case.fn, wide, incoming=dtype))
    # In float16 the scale of the chunks is computed outside of the op, in regions of its own.
    assert sum(executed) == sum(case.regions) or name == "linear_cross_entropy"


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=lambda one: str(one).removeprefix("torch."))
def test_an_op_has_the_values_of_plain_torch(name: str, dtype: torch.dtype, on_the_cpu: StandIn) -> None:
    assert_as_plain_torch(name, dtype, on_the_cpu)


@pytest.mark.parametrize("name", ["dropout", "bias_activation_dropout-silu", "bias_dropout_residual_rms_norm-pre"])
def test_the_mask_is_the_same_as_on_every_backend(name: str, on_the_cpu: StandIn) -> None:
    """A dropped element is a zero in the gradient of x."""
    case = CASES[name]
    inputs = case.inputs(torch.float32)
    fused, plain = (run(fn, inputs, incoming=torch.float32) for fn in (fuse(case.fn, backend="nvfuser"), case.fn))
    assert torch.equal(fused.gradients[0] == 0, plain.gradients[0] == 0)
    assert (fused.gradients[0] == 0).any()
    torch.testing.assert_close(fused.all, plain.all)


def test_a_drawn_seed_gives_eagers_mask(on_the_cpu: StandIn) -> None:
    def drops(x: Tensor) -> Tensor:
        return ops.dropout(x.exp(), 0.5) * 2

    x = torch.randn(6, 20)
    torch.manual_seed(5)
    fused = fuse(drops, backend="nvfuser", fallback=())(x)
    torch.manual_seed(5)
    torch.testing.assert_close(fused, drops(x))


@pytest.mark.parametrize("torch_random", [False, True])
def test_torchs_own_dropout_has_the_mask_of_the_eager_backend(torch_random: bool, on_the_cpu: StandIn) -> None:
    def drops(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x.exp(), 0.5).sin() * 2

    x = torch.randn(6, 20, requires_grad=True)
    ran = []
    for backend in ("nvfuser", "eager"):
        torch.manual_seed(5)
        fused = fuse(drops, backend=backend, fallback=(), torch_random=torch_random)
        ran.append(run(fused, (x,), incoming=torch.float32))
    torch.testing.assert_close(ran[0].all, ran[1].all)
    assert on_the_cpu.executions >= 2


@pytest.mark.parametrize(
    "name", ["bias_activation_dropout-gelu", "bias_dropout_residual_rms_norm-prenorm", "layer_norm"]
)
def test_a_cut_saves_what_inductors_saves(name: str, on_the_cpu: StandIn) -> None:
    case = CASES[name]
    inputs = case.inputs(torch.float32)
    by_inductor = explain(case.fn, *inputs, backend="inductor").totals["this"].saved_bytes
    assert saved_bytes(fuse(case.fn, backend="nvfuser", fallback=()), *inputs) == by_inductor
