import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.ops import log_softmax, softmax
from fuselayers.partition import fuse, saved_bytes
from tests.ops import truth

Form = Callable[..., Tensor]


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def mask_of(scores: Tensor) -> Tensor:
    """Return a mask of scores' shape that hides one position in three, and every fourth row."""
    places = torch.arange(scores.numel()).view(scores.shape)
    return (places % 3 != 1) & (places // scores.shape[-1] % 4 != 3)


def causal_mask(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def without_infinities(function: Form) -> Form:
    """`function` with zeros in place of -inf, which has no finite differences."""

    def call(*inputs: Any, **options: Any) -> Tensor:
        y = function(*inputs, **options)
        return y.masked_fill(y.detach().isneginf(), 0.0)

    return call


# More queries than keys, more keys than queries, and as many; each with the causal mask and without.
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(9, 7), (7, 9), (5, 5)], ids=str)
def test_is_its_formula(shape: tuple[int, int], causal: bool) -> None:
    (scores,) = tensors(shape, dtype=torch.float64)
    mask = mask_of(scores)
    sees = mask & causal_mask(*shape) if causal else mask
    assert not sees.any(-1).all()  # some row sees nothing
    exact = truth.softmax(scores, sees, -0.7)
    y = softmax(scores, mask, causal=causal, scale=-0.7)
    torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)
    log_y = log_softmax(scores, mask, causal=causal, scale=-0.7)
    torch.testing.assert_close(log_y.exp(), exact, rtol=1e-12, atol=1e-12)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = softmax(scores.to(dtype), mask, causal=causal, scale=-0.7)
        rounded = truth.softmax(scores.to(dtype).double(), sees, -0.7)
        torch.testing.assert_close(y.double(), rounded, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


# The two formulas have separate backwards, and a branch joins the causal mask to the other mask.
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_gradients(function: Form, causal: bool) -> None:
    scores = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    call = without_infinities(partial(function, mask=mask_of(scores), causal=causal, scale=0.3))
    assert torch.autograd.gradcheck(call, scores)
    assert torch.autograd.gradgradcheck(call, scores)
    added = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        without_infinities(partial(function, scores.detach(), causal=causal, scale=0.3)), added
    )


@pytest.mark.parametrize(("queries", "keys"), [(4, 7), (7, 4)])
def test_is_the_softmax_of_torchs_attention(queries: int, keys: int) -> None:
    q, k = torch.randn(2, queries, 8), torch.randn(2, keys, 8)
    # With the identity as values, attention returns its weights.
    values = torch.eye(keys).expand(2, keys, keys)
    scores = q @ k.mT
    expected = F.scaled_dot_product_attention(q, k, values, is_causal=True, scale=0.6)
    torch.testing.assert_close(softmax(scores, causal=True, scale=0.6), expected)
    for mask in (mask_of(scores), torch.randn(queries, 1), mask_of(scores)[:1, :1]):
        expected = F.scaled_dot_product_attention(q, k, values, attn_mask=mask, scale=0.6)
        torch.testing.assert_close(softmax(scores, mask, scale=0.6), expected)


def test_nan_and_inf_propagate_as_in_torch() -> None:
    inf, nan, large = math.inf, math.nan, torch.finfo(torch.float32).max
    scores = torch.tensor(
        [
            *([nan, 1, 2], [inf, 1, 2], [inf, -inf, 1], [-inf, 1, 2], [-inf, -inf, -inf], [large, -large, 1]),
            *([1e30, 1e30, -inf], [nan, -inf, inf], [1, 2, 3]),
        ]
    )
    hidden = torch.full((len(scores), 2), nan)
    mask = torch.tensor([True, True, True, False, False])
    y = softmax(torch.cat([scores, hidden], -1), mask)
    torch.testing.assert_close(y[:, :3], scores.softmax(-1), equal_nan=True)
    assert torch.equal(y[:, 3:], torch.zeros_like(hidden))


# Zero times infinity and zero times NaN are both NaN; each backward masks by itself.
@pytest.mark.parametrize("function", [softmax, log_softmax])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradients_of_hidden_positions_have_no_influence(value: float, function: Form) -> None:
    scores, incoming = tensors((5, 7), (5, 7))
    sees = mask_of(scores)
    scores = scores.masked_fill(~sees, math.nan).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        y = function(scores, sees)
        gradients = [
            torch.autograd.grad(y, scores, incoming.masked_fill(~sees, fill), retain_graph=True)[0]
            for fill in (value, 0.0)
        ]
    assert torch.equal(*gradients)
    assert torch.equal(gradients[0][~sees], torch.zeros_like(gradients[0][~sees]))
    assert bool(gradients[0][:3][sees[:3]].isfinite().all())


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused_backward_saves_one_tensor_and_the_mask(backend: str) -> None:
    scores = torch.randn(4, 64, 128, requires_grad=True)
    mask = torch.ones(64, 128, dtype=torch.bool).tril()
    fused = fuse(lambda scores, mask: softmax(scores, mask, scale=0.5), backend=backend, fallback=())
    assert saved_bytes(fused, scores, mask) <= scores.nbytes + mask.nbytes + 2 * 4 * 64 * 4
    torch.testing.assert_close(fused(scores, mask), softmax(scores, mask, scale=0.5))


ROW = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("scores", "options", "error", "text"),
    [
        (ROW[0], {"causal": True}, ValueError, "causal scores must be [..., T, S], queries by keys, got [3]; leave"),
        (ROW, {"mask": [[True]]}, TypeError, "mask must be a bool or floating tensor or None, got list"),
        (ROW, {"mask": ROW.long()}, TypeError, "mask must be bool, True where a score takes part, or floating, added"),
        (ROW, {"mask": ROW.to(torch.float8_e4m3fn)}, TypeError, "mask must be a floating-point tensor of 16 bits at"),
        (ROW, {"mask": ROW[:, :2]}, ValueError, "mask must be broadcastable to scores' shape [2, 3], got [2, 2]"),
        (ROW, {"mask": ROW[None]}, ValueError, "mask must be broadcastable to scores' shape [2, 3], got [1, 2, 3]"),
        (ROW, {"mask": ROW.to("meta")}, ValueError, "mask must be on scores' device cpu, got meta; move it with .to("),
        (ROW, {"scale": math.inf}, ValueError, "scale must be a finite number, got inf"),
        (ROW, {"scale": math.nan}, ValueError, "scale must be a finite number, got nan"),
        (ROW, {"scale": "1"}, TypeError, "scale must be a finite number, got str; pass a float"),
    ],
)
def test_errors(scores: Tensor, options: dict[str, Any], error: type[Exception], text: str) -> None:
    for function in (softmax, log_softmax):
        with pytest.raises(error) as raised:
            function(scores, **options)
        assert str(raised.value).startswith(text)
