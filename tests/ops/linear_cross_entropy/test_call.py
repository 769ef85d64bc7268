from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.ops import cross_entropy, linear_cross_entropy
from fuselayers.ops.linear_cross_entropy import chunks
from fuselayers.partition import fuse, saved_bytes
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
from tests.ops.contract import DEVICE, both_backends, on_kernels, tensors
from tests.ops.linear_cross_entropy.inputs import (
    FULL,
    D,
    R,
    V,
    gradients,
    inputs_of,
    leaves_of,
    op,
    reductions,
    reference,
    target_for,
)
from tests.selection import every_value


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    every_value(((5,), (1, 1), (2, 7, 5), (41, 3), (0, 4)), DTYPES, ({}, FULL)),
    ids=str,
)
def test_formula_matches_reference(shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, float]) -> None:
    for reduction in ("sum", "none"):
        assert_as_good_as(op, reference, inputs_of(*shape, dtype=dtype), reduction=reduction, **options)


# Each dtype and each set of options compiles other kernels; one row, several chunks and no row run other loops.
@on_kernels
@pytest.mark.parametrize("options", [{}, FULL], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("shape", [(5,), (2, 7, 5), (0, 4)], ids=str)
def test_kernels_match_reference(shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, float]) -> None:
    for reduction in ("sum", "none"):
        inputs = inputs_of(*shape, dtype=dtype)
        assert_as_good_as(partial(op, backend="triton"), reference, inputs, reduction=reduction, **options)


@both_backends
@pytest.mark.parametrize(("classes", "dtype"), every_value((1, 33, 5000), DTYPES[:3]), ids=str)
def test_mean(classes: int, dtype: torch.dtype, backend: str) -> None:
    inputs = inputs_of(14, 5, classes=classes, dtype=dtype)
    assert_as_good_as(partial(op, backend=backend), reference, inputs, **FULL)


@both_backends
@pytest.mark.parametrize("check", [check_layouts, check_single_gradients, check_poisoned])
def test_contract(check: Any, backend: str) -> None:
    check(partial(op, backend=backend), reference, inputs_of(2, 3, 5), reduction="none", **FULL)


@both_backends
# Fewer rows than the width, and more.
@pytest.mark.parametrize(("rows", "reduction"), every_value((4, 14), ("mean", "none")))
def test_second_derivatives_transforms_nan_and_inf(rows: int, reduction: str, backend: str) -> None:
    call = (partial(op, backend=backend), reference, inputs_of(rows, 5))
    options = {"reduction": reduction, **FULL}
    assert "can be differentiated only once" in str(check_double_backward(*call, **options))
    check_not_finite(*call, **options)
    said = check_transforms(*call, **options)
    assert said is None if backend == "eager" else "backend 'triton' cannot take this call" in str(said)


@both_backends
@pytest.mark.parametrize("reduction", ["mean", "none"])
# More rows than the width, and fewer.
@pytest.mark.parametrize(
    ("compiler", "shape"),
    [("eager", (9, 5)), ("eager", (6, 40)), pytest.param("inductor", (9, 5), marks=pytest.mark.slow)],
    ids=str,
)
def test_fused(compiler: str, shape: tuple[int, int], reduction: str, backend: str) -> None:
    form = partial(op, backend=backend)
    check_fused(form, reference, inputs_of(*shape), backend=compiler, reduction=reduction, **FULL)


@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.slow)])
def test_dynamic_shapes(reduction: str) -> None:
    check_dynamic(op, reference, lambda shape: inputs_of(*shape, classes=3), reduction=reduction, **FULL)


@both_backends
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_graph_for_any_number_of_chunks(reduction: str, backend: str) -> None:
    graphs = []

    def count(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    form = partial(op, backend=backend, reduction=reduction)
    compiled = torch.compile(form, backend=count, fullgraph=True, dynamic=True)
    _, *others = leaves_of(5, 2)
    for rows in (5, 15, 45):
        x = leaves_of(rows, 2)[0]
        torch.testing.assert_close(compiled(x, *others), form(x, *others))
    assert len(graphs) == 1


@both_backends
# With fewer rows than the width, gradients are computed in another order; without a mean, backward scales each row.
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("rows", [4, 9])
def test_compiled_with_one_tensor_as_x_and_weight(rows: int, reduction: str, backend: str) -> None:
    def form(x: Tensor) -> Tensor:
        target = torch.arange(len(x), device=x.device)
        return linear_cross_entropy(x, x, target, backend=backend, reduction=reduction)

    (x,) = tensors((rows, 5))
    x.div_(8).requires_grad_()
    got, expected = torch.compile(form, backend="aot_eager", fullgraph=True)(x), form(x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradients(got, [x]), gradients(expected, [x]))


@both_backends
@reductions
def test_rows_that_are_all_ignored(reduction: str, backend: str) -> None:
    leaves = x, weight, bias = leaves_of(14, 5)
    target = torch.full((14,), -100, device=DEVICE)
    loss = linear_cross_entropy(x, weight, target, bias=bias, reduction=reduction, backend=backend, **FULL)
    assert loss.isnan().all() if reduction == "mean" else torch.equal(loss, torch.zeros_like(loss))
    for gradient in gradients(loss, leaves):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_without_gradients() -> None:
    x, weight, bias = leaves_of(14, 5)
    expected = op(x, weight, bias, **FULL)
    with torch.no_grad():
        got = op(x, weight, bias, **FULL)
    assert not got.requires_grad
    torch.testing.assert_close(got, expected)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU the assertion would break all later tests")
def test_a_target_out_of_range() -> None:
    x, weight, _ = inputs_of(2, 5)
    with pytest.raises(IndexError, match=r"^Target 33 is out of bounds\.$"):
        linear_cross_entropy(x, weight, torch.tensor([1, 33]))


@on_kernels
def test_a_target_out_of_range_for_kernels() -> None:
    x, weight, _ = inputs_of(2, 5)
    target = torch.tensor([1, 33], device=DEVICE)
    losses = linear_cross_entropy(x, weight, target, reduction="none", backend="triton")
    assert losses.isnan().tolist() == [False, True]


@both_backends
def test_fewer_rows_than_the_width(backend: str) -> None:
    form = partial(op, backend=backend)
    for reduction in ("mean", "sum"):
        assert_as_good_as(form, reference, inputs_of(2, 3, 40), reduction=reduction, **FULL)
    check_single_gradients(form, reference, inputs_of(2, 3, 40), **FULL)
    leaves = x, weight, bias = leaves_of(6, 40)
    assert saved_bytes(form, *leaves, parameters=[weight, bias]) == x.nbytes + 6 * 33 * 4  # dlogits
    frozen = leaves[0], *(leaf.detach() for leaf in leaves[1:])
    assert saved_bytes(form, *frozen, parameters=leaves) == x.nbytes  # dx


PLACES = {
    "eager": lambda form: form,
    "torch.compile": lambda form: torch.compile(form, backend="aot_eager_decomp_partition", fullgraph=True),
    "fuse": lambda form: fuse(form, backend="eager", fallback=(), fullgraph=True),
    "fuse, default": lambda form: fuse(form, backend="eager", partition="default", fallback=(), fullgraph=True),
}


@pytest.mark.parametrize(("place", "dtype"), every_value(list(PLACES), (torch.float32, torch.bfloat16)), ids=str)
def test_a_mean_saves_the_gradients(place: str, dtype: torch.dtype) -> None:
    leaves = leaves_of(R, D, classes=V, dtype=dtype)
    assert saved_bytes(PLACES[place](op), *leaves, parameters=leaves) == sum(leaf.nbytes for leaf in leaves)


@pytest.mark.parametrize(
    ("place", "case"),
    every_value(list(PLACES), ((torch.float32, "none"), (torch.float16, "none"), (torch.float16, "mean"))),
    ids=str,
)
def test_else_it_saves_its_inputs(place: str, case: tuple[torch.dtype, str]) -> None:
    dtype, reduction = case
    leaves = leaves_of(R, D, classes=V, dtype=dtype)
    # The target and three numbers for each row, and for "mean" the number of rows.
    assert saved_bytes(PLACES[place](partial(op, reduction=reduction)), *leaves, parameters=leaves) <= R * (8 + 12) + 8


@on_kernels
@pytest.mark.parametrize(("dtype", "reduction"), every_value(DTYPES[:3], ("mean", "sum", "none")), ids=str)
def test_logits_that_fit_are_saved(dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a gradient in forward nor a second product: the logits, the target and two numbers for each row."""
    monkeypatch.setattr(chunks, "LOGITS_AT_ONCE", R * V * dtype.itemsize)
    form = partial(op, backend="triton", reduction=reduction)
    leaves = leaves_of(R, D, classes=V, dtype=dtype)
    assert saved_bytes(form, *leaves, parameters=leaves) <= R * V * dtype.itemsize + R * (8 + 8) + 8
    assert_as_good_as(form, partial(reference, reduction=reduction), [leaf.detach() for leaf in leaves], **FULL)
    monkeypatch.setattr(chunks, "LOGITS_AT_ONCE", R * V * dtype.itemsize - 1)
    assert saved_bytes(form, *leaves, parameters=leaves) < R * V * dtype.itemsize


@on_kernels
def test_kernels_save_no_more() -> None:
    leaves = leaves_of(R, D, classes=V)
    form = partial(op, reduction="none", backend="triton")
    assert saved_bytes(form, *leaves, parameters=leaves) == R * (8 + 12)
    assert saved_bytes(partial(op, backend="triton"), *leaves, parameters=leaves) == sum(leaf.nbytes for leaf in leaves)


@both_backends
def test_a_scaled_loss_in_float16_has_gradients(backend: str) -> None:
    """A mean over many rows, differentiated as by a GradScaler: unscaled, much of dx would be 0 in float16."""
    x, weight, _ = leaves_of(512, 4, classes=50, dtype=torch.float16)
    x, weight = (leaf.detach().div(256).requires_grad_() for leaf in (x, weight))
    target, scale = torch.arange(512, device=DEVICE) % 50, 2.0**12
    loss = linear_cross_entropy(x, weight, target, backend=backend, reduction="mean")
    dx = torch.autograd.grad(loss, x, torch.full_like(loss, scale))[0].double() / scale
    wide = x.detach().double().requires_grad_()
    exact = torch.autograd.grad(F.cross_entropy(wide @ weight.detach().double().T, target), wide)[0]
    assert (exact.half().double() - exact).abs().mean() > exact.abs().mean() / 256
    assert (dx - exact).abs().mean() < exact.abs().mean() / 256


@both_backends
def test_backward_may_be_called_twice(backend: str) -> None:
    for reduction in ("mean", "none"):
        leaves = leaves_of(14, 5)
        loss = op(*leaves, reduction=reduction, backend=backend).sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(2 * loss, leaves)
        torch.testing.assert_close(second, tuple(2 * gradient for gradient in first))


@both_backends
def test_autocast_is_that_of_linear(backend: str) -> None:
    for reduction in ("mean", "none"):
        leaves = x, weight, bias = leaves_of(14, 5)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            got = op(x, weight, bias, reduction=reduction, backend=backend)
            expected = cross_entropy(F.linear(x, weight, bias), target_for(x, weight), reduction=reduction)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected)
        for gradient, wanted in zip(gradients(got, leaves), gradients(expected, leaves), strict=True):
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(gradient, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


def test_autocast_mixes_dtypes_and_leaves_float64() -> None:
    x, weight, bias = inputs_of(14, 5)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(op(x.bfloat16(), weight, bias), op(x, weight.bfloat16(), bias))
        exact = op(*(tensor.double() for tensor in (x, weight, bias)))
    torch.testing.assert_close(exact, op(*(tensor.double() for tensor in (x, weight, bias))), rtol=1e-12, atol=0)


def test_a_backward_in_a_transform_is_refused() -> None:
    leaves = leaves_of(14, 5)
    loss = op(*leaves)
    with pytest.raises(RuntimeError, match=r"^linear_cross_entropy can be differentiated only once; for a b"):
        torch.vmap(lambda dloss: torch.autograd.grad(loss, leaves, dloss, retain_graph=True))(torch.ones(2))


@pytest.mark.parametrize(
    ("place", "rows", "reduction", "autocast"),
    # Fewer rows than the width, and more.
    every_value(("torch.compile", "fuse", "fuse, default"), (4, 14), ("mean", "none"), (False, True)),
)
def test_a_second_derivative_is_refused_compiled_too(place: str, rows: int, reduction: str, autocast: bool) -> None:
    def second(loss: Tensor, leaf: Tensor) -> Tensor:
        first = torch.autograd.grad(loss, leaf, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    torch._dynamo.reset()
    compiled = PLACES[place](partial(op, reduction=reduction))
    for wanted in range(3):
        leaves = leaves_of(rows, 5)
        # The cubes make the gradient require grad; without them autograd would raise another error.
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=autocast):
            loss = compiled(*leaves).sum() + sum(leaf.pow(3).sum() for leaf in leaves)
        with pytest.raises(RuntimeError, match=r"does not currently support double backward|requires create_graph=F"):
            second(loss, leaves[wanted])


def test_rows_of_no_elements() -> None:
    x, weight, bias = leaves_of(3, 0)
    loss, expected = op(x, weight, bias), reference(x, weight, bias)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, [bias]), gradients(expected, [bias]))


def test_a_subclass_and_a_parameter() -> None:
    class Mine(Tensor):
        pass

    x, weight, bias = inputs_of(14, 5)
    expected = op(x, weight, bias)
    got = op(x, weight.as_subclass(Mine), bias)
    assert isinstance(got, Mine)
    torch.testing.assert_close(got.as_subclass(Tensor), expected)
    torch.testing.assert_close(op(x, nn.Parameter(weight), bias), expected)


@pytest.mark.parametrize(
    "wanted",
    [
        [True, True, True],
        pytest.param([True, False, False], marks=pytest.mark.slow),
        pytest.param([False, True, False], marks=pytest.mark.slow),
    ],
)
def test_opcheck(wanted: list[bool]) -> None:
    of_torch = torch.ops.fuselayers
    x, weight, bias = inputs_of(14, 5)
    call = (x, weight, bias, target_for(x, weight))
    options = (-100, 0.1, 0.01, "eager")
    numbers = of_torch.linear_cross_entropy_losses(*call, *options)
    torch.library.opcheck(of_torch.linear_cross_entropy_losses.default, (*call, *options))
    torch.library.opcheck(
        of_torch.linear_cross_entropy_with_gradients.default, (*call, *options, "mean", torch.float64, wanted)
    )
    backward = of_torch.linear_cross_entropy_backward.default
    torch.library.opcheck(backward, (torch.ones_like(numbers), *call, numbers, *options, wanted))
    torch.library.opcheck(of_torch.linear_cross_entropy_no_second_derivative.default, (numbers[0], [x, weight]))
    torch.library.opcheck(of_torch.linear_cross_entropy_with_dlogits.default, (*call, *options, "sum", torch.float32))


def test_errors() -> None:
    x, weight, target = torch.zeros(3, 5), torch.zeros(7, 5), torch.tensor([0, 1, 2])
    for wrong in (torch.zeros(5, 7), torch.zeros(5)):
        with pytest.raises(ValueError, match=r"^weight must be \[V, 5\] to fit x \[3, 5\], got \[5(, 7)?\]$"):
            linear_cross_entropy(x, wrong, target)
    with pytest.raises(ValueError, match=r"^weight must have at least one class, got \[0, 5\]$"):
        linear_cross_entropy(x, weight[:0], target)
    with pytest.raises(ValueError, match=r"^bias must be \[7\] to fit weight \[7, 5\], got \[5\]$"):
        linear_cross_entropy(x, weight, target, bias=torch.zeros(5))
    with pytest.raises(ValueError, match=r"^weight must be on x's device cpu, got meta; move it with .to\(x.device\)$"):
        linear_cross_entropy(x, weight.to("meta"), target)
    with pytest.raises(TypeError, match=r"^bias must have x's dtype torch.float32, got torch.float64; convert it, or"):
        linear_cross_entropy(x, weight, target, bias=torch.zeros(7).double())
    with pytest.raises(ValueError, match=r"^target must be \[3\] to fit x \[3, 5\], got \[2\]$"):
        linear_cross_entropy(x, weight, target[:2])
    with pytest.raises(ValueError, match=r"^z_loss must be finite and not negative, got -1$"):
        linear_cross_entropy(x, weight, target, z_loss=-1)
    with pytest.raises(ValueError, match=r"^no reduction 'avg'; there are: mean, none, sum$"):
        linear_cross_entropy(x, weight, target, reduction="avg")
    with pytest.raises(ValueError, match=r"^no backend 'tritn'; did you mean 'triton'\?"):
        linear_cross_entropy(x, weight, target, backend="tritn")
