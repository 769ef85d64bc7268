import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fuselayers.ops import dropout, keep_mask
from fuselayers.ops.dropout import dropout_reference
from fuselayers.partition import saved_bytes
from tests.ops.contract import (
    DTYPES,
    SHAPES,
    assert_as_good_as,
    check_fused,
    check_layouts,
    seed_of,
    tensors,
)


def op(x: torch.Tensor, *, p: float, seed: torch.Tensor) -> torch.Tensor:
    return dropout(x, p, seed=seed)


def reference(x: torch.Tensor, *, p: float, seed: torch.Tensor) -> torch.Tensor:
    return dropout_reference(x, p, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_as_good_as(op, reference, tensors(shape, dtype=dtype), p=0.3, seed=seed_of())


def test_layouts() -> None:
    check_layouts(op, reference, tensors((6, 9)), p=0.3, seed=seed_of())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_fused(backend: str) -> None:
    check_fused(op, reference, tensors((6, 20)), backend=backend, p=0.3, seed=seed_of())


def test_values_are_kept_and_scaled_or_zero() -> None:
    x = torch.ones(64, 64)
    dropped = dropout(x, 0.25, seed=seed_of())
    kept = keep_mask(seed_of(), x.shape, p=0.25)
    assert torch.equal(dropped, kept * (4 / 3))


def test_gradient_is_the_mask_times_the_scale() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(dropout(x, 0.25, seed=seed_of()).sum(), x)
    torch.testing.assert_close(gradient, keep_mask(seed_of(), x.shape, p=0.25) * (4 / 3))


def test_exact_at_zero_and_in_eval() -> None:
    x = torch.randn(3, 4)
    assert dropout(x, 0.0) is x
    assert dropout(x, 0.5, training=False) is x


def test_no_mask_is_saved() -> None:
    x = torch.randn(512, 512, requires_grad=True)
    assert saved_bytes(lambda value: dropout(value, 0.1), x) == 8


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_replays_the_mask(use_reentrant: bool) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return dropout(dropout(x, 0.5).sin(), 0.5)

    x = torch.randn(32, 32, requires_grad=True)
    torch.manual_seed(3)
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    torch.manual_seed(3)
    x.grad = None
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_double_backward_says_no() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(dropout(x, 0.5).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_every_call_draws_afresh() -> None:
    x = torch.ones(64, 64)
    assert not torch.equal(dropout(x, 0.5), dropout(x, 0.5))


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_errors(p: float) -> None:
    with pytest.raises(ValueError, match=rf"^dropout probability p must satisfy 0 <= p < 1, got {p}$"):
        dropout(torch.ones(2), p)
