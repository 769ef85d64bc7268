"""Every op of the library on the nvFuser backend: values, gradients, masks, and what is saved."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.partition import explain, fuse, saved_bytes
from fuselayers.testing import DTYPES, assert_as_good_as
from tests.ops.cases import CASES, EVERY_DAY
from tests.ops.contract import seed_of, tensors
from tests.partition.compilers.nvfuser.interpreter import StandIn

ROWS_AND_COLUMNS = (6, 20)  # the mask's last group of eight columns is cut off


def fused(fn: Any, **options: Any) -> Any:
    return fuse(fn, backend="nvfuser", fallback=(), **options)


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
        return torch.nn.functional.dropout(ops.dropout(x.exp(), 0.5, seed=seed_of()), 0.5).sin() * 2

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
