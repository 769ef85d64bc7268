from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.ops import ACTIVATIONS, linear_activation
from fuselayers.ops.activations import activate
from fuselayers.ops.linear_activation import linear_activation_reference
from fuselayers.partition import saved_bytes
from fuselayers.testing.checks import check_double_backward, check_not_finite, check_transforms
from tests.ops import truth
from tests.ops.contract import (
    DEVICE,
    assert_as_good_as,
    both_backends,
    check_fused,
    check_layouts,
    check_poisoned,
    check_single_gradients,
    on_kernels,
    tensors,
)

# x, and N: sizes of one, odd ones, and none at all in each direction.
SIZES = [
    *[((1,), 1), ((7,), 3), ((3, 5), 7), ((2, 3, 129), 129), ((1, 1025), 40), ((129, 7), 9), ((130, 72), 200)],
    *[((6, 1), 5), ((0, 4), 3), ((2, 0, 4), 3), ((5, 0), 4), ((0,), 4), ((3, 4), 0)],
]
CHECKS = (check_layouts, check_single_gradients, check_poisoned, check_not_finite)
# On a GPU "auto" takes the same.
kernels = partial(linear_activation, backend="triton")
every_size = pytest.mark.parametrize(("shape", "width"), SIZES, ids=str)
every_activation = pytest.mark.parametrize("activation", [*ACTIVATIONS, None])
one_dtype_every_day = pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(one, marks=pytest.mark.slow) for one in (torch.float32, torch.float16))],
    ids=str,
)


def inputs_of(
    shape: tuple[int, ...], width: int, dtype: torch.dtype = torch.float32, *, bias: bool = True
) -> list[Tensor]:
    """x, weight and bias; the weight is small enough for sums of the order of one."""
    x, weight, vector = tensors(shape, (width, shape[-1]), (width,), dtype=dtype)
    return [x, weight / 8, vector] if bias else [x, weight / 8]


def asked_for_gradients(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in shapes]


def rounded_once_between(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None) -> Tensor:
    # The formula rounds every step of an activation. Of star_relu in bfloat16 one value's roundings cancel that of z.
    z = F.linear(x, weight, bias)
    return activate(z.to(torch.promote_types(z.dtype, torch.float32)), activation).to(z.dtype)


# Not in float16, for so many elements: there the product is rounded, and the kernel's approximation of gelu, a tenth of
# the last bit, may then round an element to the other side.
@on_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@every_size
def test_kernel_matches_reference(shape: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    for bias in (True, False):
        inputs = inputs_of(shape, width, dtype, bias=bias)
        assert_as_good_as(kernels, rounded_once_between, inputs, activation="gelu")


@on_kernels
@one_dtype_every_day
@every_activation
def test_every_activation_of_the_kernel(activation: str | None, dtype: torch.dtype) -> None:
    inputs = inputs_of((9, 24), 40, dtype)
    assert_as_good_as(kernels, rounded_once_between, inputs, activation=activation)


@every_activation
def test_is_its_formula(activation: str | None) -> None:
    x, weight, bias = inputs_of((3, 6), 5, torch.float64)
    z = torch.tensor([[sum(a * b for a, b in zip(row, w, strict=True)) for w in weight.tolist()] for row in x.tolist()])
    expected = z.double() + bias if activation is None else truth.activated(activation, z.double() + bias)
    torch.testing.assert_close(linear_activation(x, weight, bias, activation=activation), expected)


@on_kernels
@pytest.mark.parametrize(
    ("check", "activation"),
    [
        pytest.param(
            check, activation, marks=pytest.mark.slow if check is check_layouts and activation != "gelu" else ()
        )
        for activation in ("gelu", "relu", None)
        for check in CHECKS
    ],
)
def test_contract_of_the_kernel(check: Callable[..., None], activation: str | None) -> None:
    check(kernels, linear_activation_reference, inputs_of((6, 16), 24), activation=activation)
    check(kernels, linear_activation_reference, inputs_of((6, 9), 7), activation=activation)


@pytest.mark.parametrize("activation", ["gelu", "relu", None])
@both_backends
def test_second_derivatives_and_transforms(backend: str, activation: str | None) -> None:
    form = partial(linear_activation, backend=backend)
    call = (form, linear_activation_reference, inputs_of((6, 9), 7))
    assert check_double_backward(*call, activation=activation) is None
    said = check_transforms(*call, activation=activation)
    assert said is None if backend == "eager" else "backend 'triton' cannot take this call" in str(said)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused(backend: str) -> None:
    inputs = inputs_of((6, 20), 12)
    check_fused(linear_activation, linear_activation_reference, inputs, backend=backend, activation="gelu")


@on_kernels
@every_activation
def test_the_kernel_saves_x_and_the_pre_activation_at_most(activation: str | None) -> None:
    x, weight, bias = asked_for_gradients((64, 32), (48, 32), (48,))
    call = partial(kernels, activation=activation)
    kept = 0 if activation is None else 64 * 48 * 4
    assert saved_bytes(call, x, weight, bias, parameters=(weight, bias)) == x.nbytes + kept


def test_errors() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"^weight must be \[N, 3\] to fit x \[2, 3\], got \[3, 4\]$"):
        linear_activation(x, weight.mT)
    with pytest.raises(ValueError, match=r"^weight must be \[N, 3\] to fit x \[2, 3\], got \[3\]$"):
        linear_activation(x, weight[0])
    with pytest.raises(ValueError, match=r"^bias must be \[4\] to fit weight \[4, 3\], got \[3\]$"):
        linear_activation(x, weight, torch.ones(3))
    with pytest.raises(ValueError, match=r"^weight must be on x's device cpu, got meta; move it with .to\(x.device\)$"):
        linear_activation(x, weight.to("meta"))
    with pytest.raises(ValueError, match=r"^bias must be on x's device cpu, got meta; move it with .to\(x.device\)$"):
        linear_activation(x, weight, torch.ones(4, device="meta"))
    text = r"must have x's dtype torch.float32, got torch.bfloat16; convert it, or call under torch.autocast$"
    with pytest.raises(TypeError, match=rf"^weight {text}"):
        linear_activation(x, weight.bfloat16())
    with pytest.raises(TypeError, match=rf"^bias {text}"):
        linear_activation(x, weight, torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"^weight must have x's dtype torch.float32, got torch.bfloat16; convert it"):
        linear_activation(x.to("meta"), weight.to("meta", torch.bfloat16))  # where there is no autocast
    with pytest.raises(TypeError, match=r"^weight must be a floating-point tensor, got torch.int64; convert it"):
        linear_activation(x, weight.long())
    with pytest.raises(TypeError, match=r"^bias must be a floating-point tensor, got torch.int64; convert it"):
        linear_activation(x, weight, torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^x must be \[..., N\], got a tensor without dimensions; give it one"):
        linear_activation(torch.tensor(3.0), weight)
    with pytest.raises(ValueError, match=r"^no activation 'gleu'; did you mean 'gelu'\?"):
        linear_activation(x, weight, activation="gleu")
    with pytest.raises(
        ValueError, match=r"^no backend 'cublas'; there are: auto, cpp, eager, triton; fuse\(op, backend="
    ):
        linear_activation(x, weight, backend="cublas")
