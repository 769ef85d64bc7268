import io
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fuselayers.ops import bias_activation_dropout, dropout
from fuselayers.partition import saved_bytes
from tests.ops import truth
from tests.ops.contract import seed_of, tensors


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


def test_a_backward_in_forward_mode_keeps_the_tangent() -> None:
    x, seed = torch.randn(4, 16, requires_grad=True), torch.tensor(7)
    y = dropout(x, 0.5, seed=seed)
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones(4, 16), torch.full((4, 16), 3.0)))
        value, tangent = forward_ad.unpack_dual(dx)
    assert torch.equal(tangent, 3 * value)


def test_is_its_formula() -> None:
    (x,) = tensors((3, 21), dtype=torch.float64)
    torch.testing.assert_close(dropout(x, 0.3, seed=seed_of()), x * truth.dropout_factor(seed_of(), x.shape, 0.3))


def test_a_refused_call_draws_no_seed() -> None:
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match=r"^x must be a floating-point tensor, got torch.int64"):
        dropout(torch.ones(2, dtype=torch.int64), 2.0)
    with pytest.raises(TypeError, match=r"^x must be a floating-point tensor, got torch.int64"):
        torch.func.vmap(lambda x: dropout(x, 0.5))(torch.ones(2, 2, dtype=torch.int64))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torch_jit_trace() -> None:
    """A trace draws at every call, takes other sizes and has gradients. A saved trace needs no op of this library."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        return bias_activation_dropout(x, p=0.5)

    traced = torch.jit.trace(layer, torch.randn(2, 5, 20, requires_grad=True))
    assert "fuselayers::" not in str(traced.graph)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)

    x = torch.randn(3, 6, 21, requires_grad=True)
    for call in (traced, loaded):
        torch.manual_seed(3)
        got = call(x)
        assert not torch.equal(got, call(x))
        torch.manual_seed(3)
        expected = layer(x)
        assert torch.equal(got, expected)
        assert torch.equal(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize("nothing", [{"p": 0.0}, {"p": 0.5, "training": False}])
def test_no_dropout_draws_no_seed(nothing: dict[str, Any]) -> None:
    x, before = torch.ones(2), torch.get_rng_state()
    assert dropout(x, **nothing) is x
    assert dropout(x, **nothing, seed=torch.tensor(7)) is x
    assert torch.equal(torch.get_rng_state(), before)
