"""Neighbouring kernels of ops become one: the same values, and gradients, as the ops apart."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.ops import bias_dropout_residual, dropout, layer_norm, rms_norm
from fuselayers.ops.implementations.launch import INTERPRETED
from fuselayers.partition import fuse
from fuselayers.testing import results
from tests.generated_kernels import fake_gpu
from tests.ops.contract import seed_of, tensors

pytestmark = pytest.mark.kernels
SHAPE, WIDTH = (2, 3, 64), 64


def prenorm(seed: Tensor, x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    s = bias_dropout_residual(x, residual, bias=bias, p=0.3, seed=seed)
    y = layer_norm(s, weight=weight, bias=norm_bias)
    return F.linear(y, torch.outer(weight, weight)) + s


def without_bias(seed: Tensor, x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    s = bias_dropout_residual(x, residual, p=0.3, seed=seed)
    return F.linear(rms_norm(s, weight=weight), torch.outer(bias, norm_bias)) + s


def plain_sum(seed: Tensor, x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    s = F.linear(x, torch.outer(weight, bias)) + F.linear(residual, torch.outer(norm_bias, bias))
    return F.linear(rms_norm(s, weight=weight), torch.outer(weight, weight)) + s


def post(seed: Tensor, x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    s = bias_dropout_residual(x, residual, bias=bias, p=0.3, seed=seed)
    return layer_norm(s, weight=weight, bias=norm_bias)


def two_norms(seed: Tensor, x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    """Of one sum; its gradients meet in a chain."""
    s = bias_dropout_residual(x, residual, bias=bias, p=0.3, seed=seed)
    y, z = layer_norm(s, weight=weight, bias=norm_bias), rms_norm(s, weight=weight)
    return F.linear(y, torch.outer(weight, bias)) + F.linear(z, torch.outer(bias, weight)) + s


def read_before(seed: Tensor, x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    """Something reads the sum before the norm does, and the norm's weight depends on it."""
    s = bias_dropout_residual(x, residual, bias=bias, p=0.3, seed=seed)
    return layer_norm(s, weight=weight + s.mean((0, 1)), bias=norm_bias)


def not_a_row(seed: Tensor, x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    """The gradient of the sum is dropped twice, and changes its shape before that."""
    s = dropout(x + residual, 0.3, seed=seed) + bias
    return layer_norm(dropout(s.view(-1, WIDTH), 0.3, seed=seed), weight=weight, bias=norm_bias) + s.view(-1, WIDTH)


JOINED = {"normalise"}, {"normalise_backward"}
APART = {"normalise", "bias_activation_dropout"}, {"normalise_backward", "bias_activation_dropout_backward"}


@pytest.mark.parametrize(
    ("fn", "ops"),
    [
        (prenorm, JOINED),
        (without_bias, JOINED),
        (plain_sum, JOINED),
        (post, JOINED),
        (two_norms, JOINED),
        (
            read_before,
            ({"normalise", "bias_activation_dropout"}, {"normalise_backward", "bias_activation_dropout_backward"}),
        ),
        (not_a_row, ({"normalise", "dropout"}, {"normalise_backward", "dropout"})),
    ],
)
def test_values_and_gradients(fn: Callable[..., Tensor], ops: tuple[set[str], set[str]]) -> None:
    inputs = [seed_of(), *tensors(SHAPE, SHAPE, (WIDTH,), (WIDTH,), (WIDTH,))]
    fused = fuse(fn, backend="triton", fallback=(), fullgraph=True, dynamic=False)
    expected = results(fn, inputs)
    if not INTERPRETED:
        torch.testing.assert_close(results(fused, inputs), expected)
        return
    with fake_gpu() as gpu:
        torch.testing.assert_close(results(partial(gpu.run, fused), inputs), expected, rtol=1e-4, atol=1e-4)
    assert tuple(gpu.ops) == ops
