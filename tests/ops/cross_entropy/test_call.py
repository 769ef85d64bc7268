import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.ops import cross_entropy
from fuselayers.ops.cross_entropy import cross_entropy_reference
from fuselayers.ops.implementations.launch import INTERPRETED
from fuselayers.partition import saved_bytes
from fuselayers.testing import (
    DTYPES,
    assert_as_good_as,
    check_double_backward,
    check_dynamic,
    check_fused,
    check_layouts,
    check_mixed_dtypes,
    check_not_finite,
    check_poisoned,
    check_single_gradients,
    check_transforms,
)
from tests.ops.contract import DEVICE, SHAPES, both_backends, every_backend, on_cpp, on_kernels, on_triton, tensors
from tests.selection import every_value
from tests.testing.meter import Launch

reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
FULL = {"label_smoothing": 0.1, "z_loss": 0.01}


def target_of(logits: Tensor) -> Tensor:
    """Classes from the whole range; every fifth row is ignored."""
    place = torch.arange(math.prod(logits.shape[:-1]), device=logits.device)
    return torch.where(place % 5 == 1, -100, place * 7 % logits.shape[-1]).reshape(logits.shape[:-1])


# The target is made from the logits' shape, since the contract takes the gradient of every input.
def op(logits: Tensor, **options: Any) -> Tensor:
    return cross_entropy(logits, target_of(logits), **options)


def reference(logits: Tensor, **options: Any) -> Tensor:
    return cross_entropy_reference(logits, target_of(logits), **options)


def of_torch(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), **options)
    return loss.reshape(target.shape) if options.get("reduction") == "none" else loss


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits, torch.arange(loss.numel(), device=DEVICE).reshape(loss.shape).to(loss))[0]


# The formula sums differently in each dtype; FULL adds the terms of smoothing and z-loss to value and gradient.
@pytest.mark.parametrize("options", [{}, FULL], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_formula_matches_reference(shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, float]) -> None:
    for reduction in ("sum", "none"):
        assert_as_good_as(op, reference, tensors(shape, dtype=dtype), reduction=reduction, **options)


@on_kernels
@pytest.mark.parametrize(("shape", "dtype", "options"), every_value(SHAPES, DTYPES[:3], ({}, FULL)), ids=str)
def test_kernels_match_reference(shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, float]) -> None:
    for reduction in ("sum", "none"):
        inputs = tensors(shape, dtype=dtype)
        assert_as_good_as(partial(op, backend="triton"), reference, inputs, reduction=reduction, **options)


@every_backend
@pytest.mark.parametrize("check", [check_layouts, check_single_gradients, check_mixed_dtypes, check_poisoned])
def test_contract(check: Any, backend: str) -> None:
    check(partial(op, backend=backend), reference, tensors((2, 6, 9)), reduction="none", **FULL)


@every_backend
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_transforms_nan_and_inf(reduction: str, backend: str) -> None:
    call = (partial(op, backend=backend), reference, tensors((6, 9)))
    options = {"reduction": reduction, **FULL}
    assert check_double_backward(*call, **options) is None
    check_not_finite(*call, **options)
    said = check_transforms(*call, **options)
    assert said is None if backend == "eager" else f"backend '{backend}' cannot take this call" in str(said)


@both_backends
def test_dynamic_shapes(backend: str) -> None:
    check_dynamic(partial(op, backend=backend), reference, lambda shape: tensors(shape), **FULL)


@both_backends
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused(compiler: str, backend: str) -> None:
    check_fused(partial(op, backend=backend), reference, tensors((6, 20)), backend=compiler, **FULL)


@every_backend
@reductions
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2, 1.0])
def test_is_that_of_torch(label_smoothing: float, reduction: str, backend: str) -> None:
    logits = torch.randn(2, 6, 33, device=DEVICE, requires_grad=True)
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "reduction": reduction, "ignore_index": 14}
    target = target_of(logits).clamp(min=0)
    assert (target == 14).any()
    got = cross_entropy(logits, target, backend=backend, **options)
    expected = of_torch(logits, target, **options)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradient(got, logits), gradient(expected, logits))


@every_backend
def test_rows_that_are_all_ignored(backend: str) -> None:
    logits = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    target = torch.full((3,), -100, device=DEVICE)
    for options in ({}, FULL):
        mean = cross_entropy(logits, target, backend=backend, **options)
        total = cross_entropy(logits, target, reduction="sum", backend=backend, **options)
        assert mean.isnan()
        assert total == 0
        for loss in (mean, total):
            assert torch.equal(gradient(loss, logits), torch.zeros_like(logits))


@every_backend
def test_classes_with_logit_minus_infinity(backend: str) -> None:
    # A kernel reads a row in pieces. Here the first piece has no finite logit.
    logits = torch.randn(3, 4200, device=DEVICE)
    logits[0, :4100] = logits[1, 5:9] = -torch.inf
    logits.requires_grad_()
    target = torch.tensor([4150, 3, 3], device=DEVICE)
    got, expected = cross_entropy(logits, target, backend=backend), of_torch(logits, target)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradient(got, logits), gradient(expected, logits))


# Smoothing sums all logits, and so their offsets; 4,200 columns take a kernel several passes.
@every_backend
@pytest.mark.parametrize(("width", "label_smoothing"), [(33, 0.1), (4200, 0.0), (4200, 0.1)])
def test_logits_far_from_zero(width: int, label_smoothing: float, backend: str) -> None:
    def of_torchs_own(logits: Tensor, **options: Any) -> Tensor:
        return of_torch(logits, target_of(logits), **options)

    options: dict[str, Any] = {"label_smoothing": label_smoothing, "reduction": "none"}
    for offset in (-1000, 1e5):  # float32 still holds multiples of 1/32 there
        inputs = [tensors((6, width))[0] + offset]
        assert_as_good_as(partial(op, backend=backend), of_torchs_own, inputs, **options)


@on_kernels
@pytest.mark.parametrize("wrong", [5, 1 << 40, -1, -(1 << 40)])
def test_a_target_out_of_range_for_kernels(wrong: int) -> None:
    logits = torch.zeros(2, 5, device=DEVICE, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1, wrong], device=DEVICE), reduction="none", backend="triton")
    dlogits = torch.autograd.grad(loss, logits, torch.ones_like(loss))[0]
    assert loss.isnan().tolist() == [False, True]
    assert dlogits.isnan().all(-1).tolist() == [False, True]
    assert not dlogits[0].isnan().any()


@both_backends
def test_autocast_gives_losses_in_float32(backend: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        (logits,) = tensors((6, 9), dtype=dtype)
        for reduction in ("mean", "none"):
            expected = op(logits.float(), reduction=reduction, **FULL)
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                got = op(logits, reduction=reduction, backend=backend, **FULL)
            torch.testing.assert_close(got, expected)
            assert got.dtype == torch.float32


# C++ and Triton save in separate functions; a mean saves one more number.
@pytest.mark.parametrize("backend", [on_cpp, on_triton])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@reductions
def test_kernels_save_logits_target_and_two_numbers_per_row(reduction: str, dtype: torch.dtype, backend: str) -> None:
    logits = torch.randn(64, 40, device=DEVICE, dtype=dtype, requires_grad=True)
    kept = saved_bytes(partial(op, reduction=reduction, backend=backend), logits)
    assert kept == logits.nbytes + 64 * (8 + 8) + (8 if reduction == "mean" else 0)


@reductions
def test_gradcheck_of_reference_and_formula(reduction: str) -> None:
    (logits,) = tensors((6, 5), dtype=torch.float64)
    logits.requires_grad_()
    for form in (reference, op):
        assert torch.autograd.gradcheck(partial(form, reduction=reduction, **FULL), logits)


def test_errors() -> None:
    logits, target = torch.zeros(3, 5), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"^logits must have at least one class, got \[3, 0\]$"):
        cross_entropy(torch.zeros(3, 0), target)
    with pytest.raises(TypeError, match=r"^target must be an int64 tensor, got list$"):
        cross_entropy(logits, [0, 1, 2])
    with pytest.raises(TypeError, match=r"^target must hold class indices in int64, got torch.int32; convert it with"):
        cross_entropy(logits, target.int())
    with pytest.raises(TypeError, match=r"in int64, got torch.float32; class probabilities are not supported$"):
        cross_entropy(logits, logits)
    with pytest.raises(ValueError, match=r"^target must be \[3\] to fit logits \[3, 5\], got \[2\]$"):
        cross_entropy(logits, target[:2])
    with pytest.raises(ValueError, match=r"^target must be on logits's device cpu, got meta; move it with .to\(logits"):
        cross_entropy(logits, target.to("meta"))
    with pytest.raises(TypeError, match=r"^ignore_index must be an int, got float$"):
        cross_entropy(logits, target, ignore_index=0.5)
    with pytest.raises(TypeError, match=r"^label_smoothing must be a number, got a tensor; pass label_smoothing.item"):
        cross_entropy(logits, target, label_smoothing=torch.tensor(0.1))
    with pytest.raises(TypeError, match=r"^z_loss must be a number, got str$"):
        cross_entropy(logits, target, z_loss="0.1")
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=rf"^label_smoothing must satisfy 0 <= label_smoothing <= 1, got {value}$"):
            cross_entropy(logits, target, label_smoothing=value)
    for value in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=rf"^z_loss must be finite and not negative, got {value}$"):
            cross_entropy(logits, target, z_loss=value)
    with pytest.raises(ValueError, match=r"^no reduction 'maen'; did you mean 'mean'\? there are: mean, none, sum$"):
        cross_entropy(logits, target, reduction="maen")


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter counts bytes")
def test_kernels_move_the_floor(launches: list[Launch]) -> None:
    (logits,) = tensors((64, 256), dtype=torch.bfloat16)
    logits.requires_grad_()
    target = torch.arange(64, device=DEVICE)
    loss = cross_entropy(logits, target, backend="triton")
    forward = launches.copy()
    loss.backward()
    # Per row: its target, two sums, loss and logit; target and loss again in the reduction; the incoming gradient.
    beside = 64 * (8 + 8 + 4 + 2 + 8 + 8)
    for floor, moved in ((1, forward), (2, launches[len(forward) :])):
        got = sum(launch.loaded + launch.stored for launch in moved)
        assert floor * logits.nbytes <= got <= floor * logits.nbytes + beside
