import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.ops.normalise import norm_reference, normalise
from tests.ops.contract import DEVICE, both_backends, on_kernels, tensors

NORMS = (
    *(ops.layer_norm, ops.residual_layer_norm, ops.bias_dropout_residual_layer_norm),
    *(ops.rms_norm, ops.residual_rms_norm, ops.bias_dropout_residual_rms_norm),
)


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


@pytest.mark.parametrize("op", NORMS)
def test_errors_of_every_norm(op: Callable[..., Any]) -> None:
    x, weight, taken = torch.ones(3, 5), torch.ones(5), inspect.signature(op).parameters
    joins = "residual" in taken

    def call(x: Tensor, weight: Tensor | None, **options: Any) -> Any:
        return op(x, *([x] if joins else []), weight=weight, **options)

    with pytest.raises(ValueError, match=r"^weight must be \[5\] to fit x \[3, 5\], got \[2\]$"):
        call(x, torch.ones(2))
    with pytest.raises(TypeError, match=r"^weight must be a floating-point tensor, got NoneType$"):
        call(x, None)
    for name in {"bias", "norm_bias"} & taken.keys():
        with pytest.raises(ValueError, match=rf"^{name} must be \[5\] to fit x \[3, 5\], got \[2\]$"):
            call(x, weight, **{name: torch.ones(2)})
    for shape in ([1, 5], [3, 4]) if joins else ():
        with pytest.raises(ValueError, match=rf"^residual must have x's shape \[3, 5\], got {re.escape(str(shape))}$"):
            op(x, torch.ones(shape), weight=weight)


@on_kernels
def test_kernels_refuse_rows_that_no_program_holds() -> None:
    x, weight = torch.ones(1, (1 << 15) + 8, device=DEVICE), torch.ones((1 << 15) + 8, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"its kernels take rows of at most 32768 columns, got 32776; use backend="):
        ops.rms_norm(x, weight=weight, backend="triton")


@pytest.mark.parametrize("op", [op for op in NORMS if "style" in inspect.signature(op).parameters])
def test_errors_of_style_and_probability(op: Callable[..., Any]) -> None:
    x, weight = torch.ones(3, 5), torch.ones(5)
    with pytest.raises(
        ValueError, match=r"^no norm style 'prenrom'; did you mean 'prenorm'\? there are: post, pre, prenorm$"
    ):
        op(x, x, weight=weight, style="prenrom")
    with pytest.raises(TypeError, match=r"^norm style must be a string, got a list$"):
        op(x, x, weight=weight, style=["post"])


def test_an_exported_norm_takes_rows_of_any_length() -> None:
    """The limit of the kernels is no guard of the graph."""

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return ops.rms_norm(x, weight=weight)

    columns = torch.export.Dim("columns")
    sizes = {"x": {1: columns}, "weight": {0: columns}}
    exported = torch.export.export(Norm(), (torch.ones(2, 8), torch.ones(8)), dynamic_shapes=sizes).module()
    assert exported(torch.ones(2, 70_000), torch.ones(70_000)).shape == (2, 70_000)
