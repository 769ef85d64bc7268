from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.ops.normalise import norm_reference, normalise
from tests.ops.contract import DEVICE, both_backends, on_kernels, tensors


def leaves() -> dict[str, Tensor]:
    names = ("x", "residual", "weight", "norm_bias", "bias")
    shapes = ((4, 9), (4, 9), (9,), (9,), (9,))
    return {name: tensor.requires_grad_() for name, tensor in zip(names, tensors(*shapes), strict=True)}


def reference(x: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    s = x + bias + residual
    return norm_reference(s, weight, norm_bias, eps=1e-2, rms=False), s


@both_backends
@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
def test_gradients_of_either_output_alone(outputs: tuple[int, ...], backend: str) -> None:
    def gradients(fn: Any, **options: Any) -> tuple[Tensor | None, ...]:
        inputs = leaves()
        results = fn(**inputs, **options)
        loss = torch.stack([results[place].square().sum() for place in outputs]).sum()
        return torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)

    got = gradients(normalise, eps=1e-2, rms=False, backend=backend)
    for gradient, expected in zip(got, gradients(reference), strict=True):
        expected = torch.zeros(9) if expected is None else expected
        gradient = torch.zeros(9) if gradient is None else gradient
        torch.testing.assert_close(gradient, expected.to(gradient), rtol=1e-4, atol=1e-4)


@both_backends
def test_without_anything_before_the_norm_the_second_output_is_the_input(backend: str) -> None:
    x, weight = tensors((4, 9), (9,))
    assert normalise(x, weight=weight, eps=1e-2, rms=True, backend=backend)[1] is x


@on_kernels
def test_kernels_refuse_rows_that_no_program_holds() -> None:
    x, weight = torch.ones(1, (1 << 15) + 8, device=DEVICE), torch.ones((1 << 15) + 8, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"its kernels take rows of at most 32768 columns, got 32776; use backend="):
        ops.rms_norm(x, weight=weight, backend="triton")


def test_an_exported_norm_takes_rows_of_any_length() -> None:
    """The limit of the kernels is no guard of the graph."""

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return ops.rms_norm(x, weight=weight)

    columns = torch.export.Dim("columns")
    sizes = {"x": {1: columns}, "weight": {0: columns}}
    exported = torch.export.export(Norm(), (torch.ones(2, 8), torch.ones(8)), dynamic_shapes=sizes).module()
    assert exported(torch.ones(2, 70_000), torch.ones(70_000)).shape == (2, 70_000)
