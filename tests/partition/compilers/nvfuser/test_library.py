"""Every op of the library, forward and backward, through the backend and the stand-in for nvFuser."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.partition import explain, fuse, saved_bytes
from tests.partition.compilers.nvfuser.accuracy import assert_accurate, run
from tests.partition.compilers.nvfuser.fusion_definition import StandIn
from tests.partition.compilers.nvfuser.library import CASES, drops_by_formula

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Another activation or another style is another formula in the same frame: one dtype is enough for each.
_VARIANTS = [name for name in CASES if "-" in name and not name.endswith(("-gelu", "-post"))]
_ONCE = {name: DTYPES[place % 3] for place, name in enumerate(_VARIANTS)}
RUNS = [(name, dtype) for name in CASES for dtype in DTYPES if _ONCE.get(name, dtype) == dtype]


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=lambda one: str(one).removeprefix("torch."))
def test_an_op_has_the_values_of_plain_torch(name: str, dtype: torch.dtype, on_the_cpu: StandIn) -> None:
    case = CASES[name]
    inputs = case.inputs(dtype)
    fused = run(fuse(case.fn, backend="nvfuser", fallback=()), inputs, incoming=dtype)
    executed = [one.executions for one in on_the_cpu.defined]
    plain = run(case.fn, inputs, incoming=dtype)
    wide = [one.detach().double().requires_grad_() if one.requires_grad else one for one in inputs]
    assert_accurate(fused, plain, run(case.fn, wide, incoming=dtype))
    # In float16 the chunks' scale is reckoned outside of the op that has them.
    assert sum(executed) == sum(case.regions) or name == "linear_cross_entropy"


@pytest.mark.parametrize("name", ["dropout", "bias_activation_dropout-silu", "bias_dropout_residual_rms_norm-pre"])
def test_the_mask_is_that_of_every_backend(name: str, on_the_cpu: StandIn) -> None:
    """An element that is dropped is a zero in the gradient of x, whatever else an op computes."""
    case = CASES[name]
    inputs = case.inputs(torch.float32)
    fused, plain = (run(fn, inputs, incoming=torch.float32) for fn in (fuse(case.fn, backend="nvfuser"), case.fn))
    assert torch.equal(fused.gradients[0] == 0, plain.gradients[0] == 0)
    assert (fused.gradients[0] == 0).any()


def test_a_drawn_seed_gives_eagers_mask(on_the_cpu: StandIn) -> None:
    def drops(x: Tensor) -> Tensor:
        return ops.dropout(x.exp(), 0.5) * 2

    x = torch.randn(6, 20)
    torch.manual_seed(5)
    fused = fuse(drops, backend="nvfuser", fallback=())(x)
    torch.manual_seed(5)
    torch.testing.assert_close(fused, drops(x))


@pytest.mark.parametrize("torch_random", [False, True])
def test_torchs_own_dropout_drops_what_it_drops_on_the_eager_backend(torch_random: bool, on_the_cpu: StandIn) -> None:
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


def test_the_formula_of_a_mask_is_fused(on_the_cpu: StandIn) -> None:
    x, seed = torch.randn(5, 21, requires_grad=True), torch.tensor(-3)
    fused = run(fuse(drops_by_formula, backend="nvfuser", fallback=()), (x, seed), incoming=torch.float32)
    keep = ops.keep_mask(seed, x.shape, p=0.25)
    assert torch.equal(fused.outputs[0], x.detach() * keep * 2)
    assert torch.equal(fused.gradients[0] == 0, ~keep)
    # One region forward, one backward, and the seed is all that they take beside x and its gradient.
    assert [len(one.fusion.inputs) for one in on_the_cpu.defined if one.fusion is not None] == [2, 2]


@pytest.mark.parametrize(
    "name", ["bias_activation_dropout-gelu", "bias_dropout_residual_rms_norm-prenorm", "layer_norm"]
)
def test_a_cut_saves_what_inductors_saves(name: str, on_the_cpu: StandIn) -> None:
    case = CASES[name]
    inputs = case.inputs(torch.float32)
    by_inductor = explain(case.fn, *inputs, backend="inductor").totals["this"].saved_bytes
    assert saved_bytes(fuse(case.fn, backend="nvfuser", fallback=()), *inputs) == by_inductor
