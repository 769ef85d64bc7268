"""Inputs of the op, and marks of its tests."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops import linear_cross_entropy
from fuselayers.ops.implementations.triton_language import HAS_TRITON
from fuselayers.ops.linear_cross_entropy import linear_cross_entropy_reference
from tests.ops.contract import DEVICE, tensors
from tests.ops.cross_entropy.test_call import target_of

FULL = {"label_smoothing": 0.1, "z_loss": 0.01}
R, D, V = 96, 8, 300
CHUNK = 8 * V
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="there are no kernels without Triton")
reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def target_for(x: Tensor, weight: Tensor) -> Tensor:
    return target_of(x.new_empty(1).expand(*x.shape[:-1], weight.shape[0]))


def op(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return linear_cross_entropy(x, weight, target_for(x, weight), bias=bias, **options)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return linear_cross_entropy_reference(x, weight, target_for(x, weight), bias=bias, **options)


def inputs_of(*shape: int, classes: int = 33, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x, weight, bias = tensors(shape, (classes, shape[-1]), (classes,), dtype=dtype)
    # Small logits, so that no class has all of the probability. Division by a power of two is exact.
    return [x, weight / 8, bias / 8]


def gradients(loss: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    incoming = torch.arange(1, loss.numel() + 1, device=DEVICE).reshape(loss.shape).to(loss)
    return torch.autograd.grad(loss, inputs, incoming)


def leaves_of(*shape: int, **options: Any) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in inputs_of(*shape, **options)]
