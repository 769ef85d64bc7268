from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops.normalise import norm_reference, normalise
from tests.ops.contract import both_backends, tensors


def inputs_of(**dtypes: torch.dtype) -> dict[str, Tensor]:
    names = ("x", "residual", "weight", "norm_bias", "bias")
    shapes = ((4, 9), (4, 9), (9,), (9,), (9,))
    made = dict(zip(names, tensors(*shapes), strict=True))
    return {name: made[name].to(dtypes.get(name, torch.float32)).requires_grad_() for name in names}


def reference(x: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    s = x + bias + residual
    return norm_reference(s, weight, norm_bias, eps=1e-2, rms=False), s


@both_backends
@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
def test_gradients_of_either_output_alone(outputs: tuple[int, ...], backend: str) -> None:
    def gradients(fn: Any, **options: Any) -> tuple[Tensor | None, ...]:
        inputs = inputs_of()
        results = fn(**inputs, **options)
        loss = torch.stack([results[place].square().sum() for place in outputs]).sum()
        return torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)

    got = gradients(normalise, eps=1e-2, rms=False, backend=backend)
    for one, other in zip(got, gradients(reference), strict=True):
        other = torch.zeros(9) if other is None else other
        one = torch.zeros(9) if one is None else one
        torch.testing.assert_close(one, other.to(one), rtol=1e-4, atol=1e-4)


@both_backends
def test_every_gradient_has_the_dtype_of_its_input(backend: str) -> None:
    half = torch.bfloat16
    inputs = inputs_of(x=half, weight=half, bias=half)
    y, s = normalise(**inputs, eps=1e-2, rms=False, backend=backend)
    assert (y.dtype, s.dtype) == (torch.float32, torch.float32)
    found = torch.autograd.grad(y.sum() + s.sum(), list(inputs.values()))
    assert [one.dtype for one in found] == [one.dtype for one in inputs.values()]


@both_backends
def test_without_anything_before_the_norm_the_second_output_is_the_input(backend: str) -> None:
    x, weight = tensors((4, 9), (9,))
    assert normalise(x, weight=weight, eps=1e-2, rms=True, backend=backend)[1] is x


@pytest.mark.kernels
def test_without_autograd() -> None:
    x, weight = tensors((4, 9), (9,))
    y, _ = normalise(x, weight=weight, eps=1e-2, rms=True, backend="triton")
    assert not y.requires_grad
    torch.testing.assert_close(y, norm_reference(x, weight, None, eps=1e-2, rms=True))
