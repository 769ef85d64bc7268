"""The contract itself: faults that it must not let through."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops.residual_layer_norm import residual_layer_norm_reference
from tests.ops.contract import (
    assert_as_good_as,
    check_autocast,
    check_dynamic,
    check_layouts,
    check_mixed_dtypes,
    check_poisoned,
    check_single_gradients,
    tensors,
)


def triple(x: Tensor, y: Tensor) -> Tensor:
    return x * 3 + y


def cares_about_layout(x: Tensor, y: Tensor) -> Tensor:
    return triple(x, y) if x.is_contiguous() else triple(x, y) + 1


class _CaresAboutIncomingLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return triple(x, y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return (dy * 3 if dy.is_contiguous() else dy * 4), dy


class _NeedsBothGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return triple(x, y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy * (3 if all(ctx.needs_input_grad) else 4), dy


def reads_unwritten_memory(x: Tensor, y: Tensor) -> Tensor:
    return triple(x, y) + torch.empty_like(x).isnan()


def keeps_the_first_dtype(x: Tensor, y: Tensor) -> Tensor:
    return triple(x, y).to(x.dtype)


def is_autocast(x: Tensor, y: Tensor) -> Tensor:
    return triple((x / 3) @ torch.eye(x.shape[-1], dtype=x.dtype) * 3, y)


def wants_one_size(x: Tensor, y: Tensor) -> Tensor:
    return triple(x, y) * (x.shape[-1] / int(x.shape[-1]) if x.shape[-1] != 129 else 1)


@pytest.mark.parametrize(
    ("check", "faulty"),
    [
        (check_layouts, cares_about_layout),
        (check_layouts, _CaresAboutIncomingLayout.apply),
        (check_single_gradients, _NeedsBothGradients.apply),
        (check_poisoned, reads_unwritten_memory),
        (check_mixed_dtypes, keeps_the_first_dtype),
        (check_autocast, is_autocast),
    ],
)
def test_faults_are_seen(check: Callable[..., None], faulty: Callable[..., Tensor]) -> None:
    inputs = tensors((6, 9), (6, 9))
    check(triple, triple, inputs)
    with pytest.raises(AssertionError):
        check(faulty, triple, inputs)


def test_a_graph_for_every_size_is_seen() -> None:
    def inputs_of(shape: tuple[int, int]) -> list[Tensor]:
        return tensors(shape, shape)

    check_dynamic(triple, triple, inputs_of)
    with pytest.raises(RuntimeError, match="fail_on_recompile"):
        check_dynamic(wants_one_size, triple, inputs_of)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 129)])
def test_statistics_in_bfloat16_are_seen(shape: tuple[int, ...]) -> None:
    def reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return residual_layer_norm_reference(x, residual, weight=weight, eps=1e-2)

    def sloppy(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        centred = total - total.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight, total

    inputs = tensors(shape, shape, shape[-1:], dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="allowed"):
        assert_as_good_as(sloppy, reference, inputs)
