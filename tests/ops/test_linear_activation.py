from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.ops import ACTIVATIONS, linear_activation
from fuselayers.ops.activations import activate
from fuselayers.ops.linear_activation import linear_activation_reference
from fuselayers.partition import fuse, saved_bytes
from fuselayers.testing.checks import check_double_backward, check_not_finite, check_transforms
from tests.ops import truth
from tests.ops.contract import (
    DEVICE,
    assert_as_good_as,
    both_backends,
    check_dynamic,
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
three_activations_every_day = pytest.mark.parametrize(
    "activation",
    [
        *("gelu", "relu", None),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ACTIVATIONS if one not in ("gelu", "relu")),
    ],
)
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
@pytest.mark.parametrize("activation", ["gelu", "relu", None])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_kernel_inside_a_compiled_function(backend: str, activation: str | None) -> None:
    inputs = inputs_of((6, 20), 12)
    check_fused(kernels, linear_activation_reference, inputs, backend=backend, activation=activation)


@on_kernels
@pytest.mark.parametrize("activation", ["gelu", None])
def test_kernel_with_one_tensor_as_x_and_weight(activation: str | None) -> None:
    def form(x: Tensor) -> Tensor:
        return linear_activation(x, x, x[0, :5] if x.shape[0] == 5 else None, activation=activation, backend="triton")

    def reference(x: Tensor) -> Tensor:
        return linear_activation_reference(x, x, x[0, :5] if x.shape[0] == 5 else None, activation=activation)

    for rows in (3, 5):
        (x,) = tensors((rows, 8))
        assert_as_good_as(form, reference, [x / 8])
        check_fused(form, reference, [x / 8], backend="eager")


@on_kernels
def test_dynamic_shapes_of_the_kernel() -> None:
    check_dynamic(kernels, linear_activation_reference, lambda shape: inputs_of(shape, shape[1] + 3), activation="gelu")


@pytest.mark.parametrize(("activation", "kept"), [(None, 0), ("relu", 4), ("gelu", 4), ("silu", 4), ("smelu", 9)])
def test_backward_saves_x_and_what_the_activation_saves(activation: str | None, kept: int) -> None:
    x, weight, bias = asked_for_gradients((64, 32), (48, 32), (48,))
    call = partial(linear_activation, activation=activation, backend="eager")
    assert saved_bytes(call, x, weight, bias, parameters=(weight, bias)) == x.nbytes + kept * 64 * 48


@on_kernels
@every_activation
def test_the_kernel_saves_x_and_the_pre_activation_at_most(activation: str | None) -> None:
    x, weight, bias = asked_for_gradients((64, 32), (48, 32), (48,))
    call = partial(kernels, activation=activation)
    kept = 0 if activation is None else 64 * 48 * 4
    assert saved_bytes(call, x, weight, bias, parameters=(weight, bias)) == x.nbytes + kept


def check_result_is_saved(form: Callable[..., Tensor], activation: str, *, is_saved: bool) -> None:
    x, weight = asked_for_gradients((6, 8), (5, 8))
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = form(x, weight, activation=activation)
    assert (y.data_ptr() in saved) == is_saved


gives_its_slope = pytest.mark.parametrize(
    ("activation", "is_saved"), [("relu", True), ("leaky_relu", True), ("gelu", False)]
)


@on_kernels
@gives_its_slope
def test_the_result_is_saved_where_it_gives_the_slope(activation: str, is_saved: bool) -> None:
    check_result_is_saved(kernels, activation, is_saved=is_saved)


def check_second_derivative(form: Callable[..., Tensor], activation: str | None) -> None:
    def second(form: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [value.requires_grad_() for value in inputs_of((3, 5), 4)]
        loss = form(*inputs, activation=activation).square().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return list(torch.autograd.grad(sum((one.square().sum() for one in first), start=first[0].sum()), inputs))

    for got, expected in zip(second(form), second(linear_activation_reference), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@on_kernels
@three_activations_every_day
def test_a_second_derivative_is_the_formulas(activation: str | None) -> None:
    check_second_derivative(kernels, activation)


def check_autocast(form: Callable[..., Tensor], activation: str | None) -> None:
    inputs = [value.requires_grad_() for value in inputs_of((6, 16), 24)]
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = form(*inputs, activation=activation)
        expected = linear_activation_reference(*inputs, activation=activation)
        # As F.linear, and unlike a promotion, it takes two dtypes there.
        mixed = form(inputs[0].bfloat16(), *inputs[1:], activation=activation)
    assert y.dtype == mixed.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(mixed, y)
    found = torch.autograd.grad(y, inputs, torch.ones_like(y))
    wanted = torch.autograd.grad(expected, inputs, torch.ones_like(y))
    for got, other in zip((y, *found), (expected, *wanted), strict=True):
        assert got.dtype == other.dtype
        torch.testing.assert_close(got, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("activation", ["gelu", None])
def test_under_autocast_it_is_a_linear_layer(activation: str | None) -> None:
    check_autocast(linear_activation, activation)
    compiled = fuse(linear_activation, backend="eager", fallback=(), fullgraph=True, static_argnames=("activation",))
    check_autocast(compiled, activation)


@on_kernels
@pytest.mark.parametrize("activation", ["gelu", None])
def test_under_autocast_the_kernel_is_a_linear_layer(activation: str | None) -> None:
    check_autocast(kernels, activation)
    compiled = fuse(kernels, backend="eager", fallback=(), fullgraph=True, static_argnames=("activation",))
    check_autocast(compiled, activation)


@on_kernels
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_bias_that_is_changed_before_backward(activation: str) -> None:
    found = []
    for form in (kernels, linear_activation_reference):
        inputs = [value.requires_grad_() for value in inputs_of((3, 4), 5)]
        y = form(*inputs, activation=activation)
        with torch.no_grad():
            inputs[2].add_(1.0)
        found.append(torch.autograd.grad(y, inputs, torch.ones_like(y)))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@on_kernels
def test_without_gradients() -> None:
    inputs = inputs_of((3, 4), 5)
    got = kernels(*inputs, activation="gelu")
    torch.testing.assert_close(got, linear_activation_reference(*inputs, activation="gelu"))
    assert not got.requires_grad


@on_kernels
def test_saves_no_x_for_a_frozen_weight() -> None:
    x, weight, bias = asked_for_gradients((64, 32), (48, 32), (48,))
    weight.requires_grad_(False)
    call = partial(kernels, activation="gelu")
    assert saved_bytes(call, x, weight, bias, parameters=(weight, bias)) == 64 * 48 * 4


@on_kernels
@three_activations_every_day
def test_nan_and_inf_propagate_as_in_the_formula(activation: str | None) -> None:
    # One by one: torch's vectorised gelu on the CPU gives NaN for inf, its scalar one inf.
    for value in (torch.nan, torch.inf, -torch.inf, 1e30, -1e30):
        for place in ((0, 0), (1, 2)):  # the other row stays as it is
            found = []
            for backend in ("eager", "triton"):
                x = torch.ones(2, 3, device=DEVICE).index_put_(
                    [torch.tensor(one) for one in place], torch.tensor(value)
                )
                x.requires_grad_()
                weight = torch.ones(1, 3, device=DEVICE)
                y = torch.cat([linear_activation(row, weight, activation=activation, backend=backend) for row in x])
                (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
                whole = linear_activation(x.detach(), weight, activation=activation, backend=backend)
                found.append((y, dx, whole if backend == "triton" else y[:, None]))
            for got, expected in zip(found[1], found[0], strict=True):
                assert torch.equal(got.isnan(), expected.isnan()), (value, place)
                assert torch.equal(got.isinf(), expected.isinf()), (value, place)


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
