import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fuselayers.ops import linear_cross_entropy, linear_log_prob
from fuselayers.ops.linear_cross_entropy import linear_log_prob_reference
from fuselayers.ops.linear_cross_entropy import log_prob as log_prob_module
from fuselayers.testing import (
    DTYPES,
    assert_as_good_as,
    check_double_backward,
    check_dynamic,
    check_fused,
    check_layouts,
    check_not_finite,
    check_poisoned,
    check_single_gradients,
    check_transforms,
)
from tests.ops.linear_cross_entropy.inputs import inputs_of, leaves_of, target_for


def differentiable(function: Any) -> Any:
    """`function` of its floating tensors, with the two results that have gradients."""

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        log_prob, entropy, _ = function(x, weight, target_for(x, weight), bias=bias)
        return log_prob, entropy

    return call


op, reference = differentiable(linear_log_prob), differentiable(linear_log_prob_reference)


# One row, several chunks and no row, each in every dtype that autograd sums in.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (2, 7, 5), (0, 4)], ids=str)
def test_it_is_its_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = inputs_of(*shape, dtype=dtype)
    assert_as_good_as(op, reference, inputs)
    x, weight, bias = inputs
    results = [
        form(x, weight, target_for(x, weight), bias=bias)[2] for form in (linear_log_prob, linear_log_prob_reference)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("check", [check_layouts, check_single_gradients, check_poisoned])
def test_contract(check: Any) -> None:
    check(op, reference, inputs_of(2, 3, 5))


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused(compiler: str) -> None:
    check_fused(op, reference, inputs_of(9, 5), backend=compiler)


def test_dynamic_shapes() -> None:
    check_dynamic(op, reference, lambda shape: inputs_of(*shape, classes=3))


def test_second_derivatives_transforms_nan_and_inf() -> None:
    call = (op, reference, inputs_of(14, 5))
    assert "can be differentiated only once" in str(check_double_backward(*call))
    check_not_finite(*call)
    assert check_transforms(*call) is None


def test_the_loss_is_minus_the_log_probability() -> None:
    x, weight, bias = leaves_of(40, 5)
    target = target_for(x, weight)
    loss = linear_cross_entropy(x, weight, target, bias=bias, reduction="sum")
    torch.testing.assert_close(-linear_log_prob(x, weight, target, bias=bias)[0].sum(), loss)


def test_a_class_of_no_probability_has_no_part_in_the_entropy() -> None:
    x, weight, bias = leaves_of(6, 5, dtype=torch.float64)
    with torch.no_grad():
        bias[3:] = -torch.inf
    target = torch.arange(6) % 3
    log_prob, entropy, _ = linear_log_prob(x, weight, target, bias=bias)
    smaller = linear_log_prob(x, weight[:3], target, bias=bias[:3])
    torch.testing.assert_close((log_prob, entropy), smaller[:2])
    (dx,) = torch.autograd.grad(log_prob.sum() + entropy.sum(), x)
    torch.testing.assert_close(dx, *torch.autograd.grad(smaller[0].sum() + smaller[1].sum(), x))


@pytest.mark.parametrize("form", ["log_prob", "loss"])
def test_ignored_rows_are_not_computed(form: str) -> None:
    x, weight, bias = leaves_of(40, 5)
    target = target_for(x, weight)
    target[4:] = -100

    def step(rows: slice) -> tuple[Tensor, tuple[Tensor, ...], int]:
        with FlopCounterMode(display=False) as counter:
            if form == "loss":
                total = linear_cross_entropy(x[rows], weight, target[rows], bias=bias, reduction="sum")
            else:
                log_prob, entropy, is_argmax = linear_log_prob(x[rows], weight, target[rows], bias=bias)
                assert not is_argmax[4:].any()
                total = log_prob.sum() + entropy.sum()
            gradients = torch.autograd.grad(total, (x, weight, bias))
        return total, gradients, counter.get_total_flops()

    all_rows, kept = step(slice(None)), step(slice(6))
    target[:6] = torch.arange(6)
    torch.testing.assert_close(all_rows[:2], kept[:2])
    assert all_rows[2] == kept[2] <= step(slice(4))[2] * 1.01


def test_a_gpu_computes_ignored_rows_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = x, weight, bias = leaves_of(40, 5)
    target = target_for(x, weight)
    target[4:30] = -100

    def step() -> tuple[Any, ...]:
        log_prob, entropy, is_argmax = linear_log_prob(x, weight, target, bias=bias)
        gradients = torch.autograd.grad([log_prob, entropy], leaves, [log_prob.detach(), entropy.detach()])
        return log_prob, entropy, is_argmax, gradients

    expected = step()
    monkeypatch.setattr(log_prob_module, "_computes_ignored_rows", lambda x: True)
    torch.testing.assert_close(step(), expected)


def test_a_frozen_weight_is_not_differentiated() -> None:
    x, weight, _ = leaves_of(40, 5)
    target = target_for(x, weight)

    def flops() -> int:
        with FlopCounterMode(display=False) as counter:
            linear_log_prob(x, weight, target)[0].sum().backward()
        return counter.get_total_flops()

    with_weight = flops()
    weight.requires_grad_(False)
    assert flops() < with_weight


def test_errors() -> None:
    x, weight, _ = inputs_of(2, 5)
    for target, error, text in (
        (torch.zeros(3, dtype=torch.int64), ValueError, "target must be [2] to fit x [2, 5], got [3]"),
        (torch.zeros(2), TypeError, "target must hold class indices in int64, got torch.float32; class"),
    ):
        with pytest.raises(error, match=f"^{re.escape(text)}"):
            linear_log_prob(x, weight, target)
    text = "weight must have at least one class, got [0, 5]"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        linear_log_prob(x, weight[:0], torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"^ignore_index must be an int, got float$"):
        linear_log_prob(x, weight, torch.zeros(2, dtype=torch.int64), ignore_index=0.5)  # type: ignore[arg-type]
