import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.ops import log_softmax, softmax
from fuselayers.ops.implementations.launch import INTERPRETED
from fuselayers.ops.softmax import log_softmax_reference, softmax_reference
from fuselayers.partition import fuse, saved_bytes
from fuselayers.testing import poisoned_memory
from tests.ops import truth
from tests.ops.cases import mask_of
from tests.ops.contract import (
    DEVICE,
    assert_as_good_as,
    on_kernels,
    tensors,
)
from tests.selection import every_value

Form = Callable[..., Tensor]
SCORES = (2, 3, 5, 16)


def causal_mask(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril()


def seen_of(fn: Form) -> Form:
    """`fn` with zeros in place of -inf, which neither errors nor differences can be taken of."""

    def call(*given: Any, **options: Any) -> Tensor:
        y = fn(*given, **options)
        return y.masked_fill(y.detach().isneginf(), 0.0)

    return call


def laid_out(name: str) -> Tensor:
    """A mask for SCORES, [B, H, T, S], by the name of how it lies; what is beside it in memory is its opposite."""
    batch, heads, queries, keys = SCORES
    full = mask_of(torch.empty(SCORES, device=DEVICE))
    return {
        "[]": full[0, 0, 0, 0],
        "[S]": full[0, 0, 0],
        "[T, S]": full[0, 0],
        "[T, 1]": full[0, 0, :, :1],
        "[H, 1, S]": full[0, :, :1],
        "[B, 1, 1, S]": full[:, :1, :1],
        "[B, 1, T, S]": full[:, :1],
        "[B, H, T, S]": full,
        "[B, H, T, 1]": full[..., 3:4],
        "[1, H, T, S]": full[:1],
        "transposed": full.mT.contiguous().mT,
        "heads last": full.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
        "every other key": torch.stack([full, ~full], dim=-1)[..., 0],
        "every other row": torch.stack([full, ~full], dim=-2)[..., 0, :],
        "padded rows": torch.cat([full, ~full], dim=-1)[..., :keys],
        "odd padding": torch.cat([full, ~full[..., :3]], dim=-1)[..., :keys],
        "out of line": torch.cat([~full[:1].flatten()[:3], full.flatten()])[3:].view(SCORES),
        "expanded": full[:, :1, :, :1].expand(batch, heads, queries, keys),
    }[name]


LAYOUTS = (
    *("[]", "[S]", "[T, S]", "[T, 1]", "[H, 1, S]", "[B, 1, 1, S]", "[B, 1, T, S]", "[B, H, T, S]", "[B, H, T, 1]"),
    *("[1, H, T, S]", "transposed", "heads last", "every other key", "every other row", "padded rows", "odd padding"),
    *("out of line", "expanded"),
)
# Without rows, without columns, of three levels, with columns apart, and with rows at odd places.
FEW_LAYOUTS = ("[S]", "[T, 1]", "[B, 1, T, S]", "every other key", "odd padding")

KERNELS = [pytest.param(name, marks=pytest.mark.kernels) for name in ("rows in registers", "rows in pieces")]
IN_REGISTERS, IN_PIECES = KERNELS


def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    if request.param == "rows in pieces":
        for name in ("forward", "backward"):
            module = sys.modules[f"fuselayers.ops.softmax.{name}"]
            monkeypatch.setattr(module, "tile_of_rows", lambda *_: (True, 1, 8, 1))
    return partial(softmax, backend="eager" if request.param == "formula" else "triton")


form = pytest.fixture(params=["formula", *KERNELS], name="form")(_form)
kernels = pytest.fixture(params=KERNELS, name="kernels")(_form)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(9, 7), (7, 9), (5, 5)], ids=str)
def test_is_its_formula(shape: tuple[int, int], causal: bool) -> None:
    (scores,) = tensors(shape, dtype=torch.float64)
    mask = mask_of(scores)
    sees = mask & causal_mask(*shape) if causal else mask
    assert not sees.any(-1).all()  # some row sees nothing
    got = softmax(scores, mask, causal=causal, scale=-0.7)
    torch.testing.assert_close(got.cpu(), truth.softmax(scores, sees, -0.7), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_the_reference_and_of_the_formula(causal: bool) -> None:
    scores = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    mask = mask_of(scores)
    for one in (softmax_reference, softmax, log_softmax_reference, log_softmax):
        call = seen_of(partial(one, mask=mask, causal=causal, scale=0.3))
        assert torch.autograd.gradcheck(call, scores)
        assert torch.autograd.gradgradcheck(call, scores)


@pytest.mark.parametrize(("queries", "keys"), [(4, 7), (7, 4), (5, 5)])
def test_is_the_softmax_of_torchs_attention(form: Form, queries: int, keys: int) -> None:
    q, k = torch.randn(2, queries, 8, device=DEVICE), torch.randn(2, keys, 8, device=DEVICE)
    # Against the identity as values, attention returns its weights.
    values = torch.eye(keys, device=DEVICE).expand(2, keys, keys)
    scores = q @ k.mT
    expected = F.scaled_dot_product_attention(q, k, values, is_causal=True, scale=0.6)
    torch.testing.assert_close(form(scores, causal=True, scale=0.6), expected)
    mask = mask_of(scores)
    assert not mask.any(-1).all()  # some row sees nothing
    expected = F.scaled_dot_product_attention(q, k, values, attn_mask=mask, scale=0.6)
    torch.testing.assert_close(form(scores, mask, scale=0.6), expected)


@pytest.mark.parametrize("hide", ["nothing", "a mask", "a mask and causality"])
def test_nan_and_inf_propagate_as_in_torch(form: Form, hide: str) -> None:
    inf, nan, large = math.inf, math.nan, torch.finfo(torch.float32).max
    seen = torch.tensor(
        [
            *([nan, 1, 2], [inf, 1, 2], [inf, inf, 1], [inf, -inf, 1], [-inf, 1, 2], [-inf, -inf, -inf], [nan] * 3),
            *([large, -large, 1], [-large, -large, -large], [1e30, 1e30, -inf], [nan, -inf, inf], [1, 2, 3]),
        ],
        device=DEVICE,
    )
    incoming = torch.tensor([1.0, -2.0, 0.5], device=DEVICE).expand_as(seen)
    scores, dy, mask = seen.clone(), incoming, None
    if hide != "nothing":
        # Three keys of ten are seen, in two pieces of a row, by all queries but the first eight. The others are NaN.
        places = torch.tensor([0, 3, 8], device=DEVICE)
        mask = torch.zeros(10, dtype=torch.bool, device=DEVICE).index_fill(0, places, True)
        scores, dy = (torch.full((8 + len(seen), 10), fill, device=DEVICE) for fill in (torch.nan, 3.0))
        scores[8:, places], dy[8:, places] = seen, incoming
    scores.requires_grad_()
    y = form(scores, mask, causal=hide == "a mask and causality")
    (dscores,) = torch.autograd.grad(y, scores, dy)
    expected = seen.requires_grad_().softmax(-1)
    (gradient,) = torch.autograd.grad(expected, seen, incoming)
    for got, wanted in ((y, expected), (dscores, gradient)):
        torch.testing.assert_close(got if mask is None else got[8:, mask], wanted, equal_nan=True)
        if mask is not None:
            assert torch.equal(got[:, ~mask], torch.zeros_like(got[:, ~mask]))


@pytest.mark.parametrize(
    ("value", "width", "hide"), every_value((math.inf, -math.inf, math.nan), (7, 16), ("a mask", "causality"))
)
def test_incoming_gradients_of_hidden_positions_have_no_influence(
    value: float, width: int, hide: str, form: Form
) -> None:
    (scores, incoming) = tensors((5, width), (5, width))
    sees = mask_of(scores) if hide == "a mask" else causal_mask(5, width)
    found = []
    for dy in (incoming.masked_fill(~sees, value), incoming.masked_fill(~sees, 0.0)):
        for create_graph in (False, True):
            leaf = scores.clone().requires_grad_()
            y = form(leaf, sees if hide == "a mask" else None, causal=hide == "causality")
            found.append(torch.autograd.grad(y, leaf, dy, create_graph=create_graph)[0].detach())
    assert not found[0].isnan().any()
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=0)
    torch.testing.assert_close(found[1], found[3], rtol=0, atol=0)


@pytest.mark.parametrize("form", ["formula", IN_REGISTERS], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_the_mask(layout: str, form: Form) -> None:
    assert_as_good_as(form, softmax_reference, tensors(SCORES), mask=laid_out(layout), scale=0.5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "shape",
    [(13, 24), (3, 5, 21), *(pytest.param(one, marks=pytest.mark.slow) for one in ((2, 11, 24), (24, 13)))],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_causal_scores_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype, masked: bool, kernels: Form) -> None:
    (scores,) = tensors(shape, dtype=dtype)
    mask = mask_of(scores) if masked else None
    with poisoned_memory():
        y, dscores = found(kernels, scores, mask)
    exact_y, exact = found(softmax_reference, scores.double(), mask)
    # A GPU's exp2 and its division are right to two units of float32 each, which shows there alone.
    unit = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
    torch.testing.assert_close(y.double(), exact_y, rtol=unit, atol=1e-6)
    torch.testing.assert_close(dscores.double(), exact, rtol=unit, atol=unit * float(exact.abs().max()))


def found(form: Any, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = scores.clone().requires_grad_()
    y = form(scores, mask, causal=True, scale=0.75)
    generator = torch.Generator().manual_seed(1)
    (dscores,) = torch.autograd.grad(y, scores, torch.randn(y.shape, generator=generator).to(y))
    return y.detach(), dscores


@on_kernels
def test_kernels_save_only_the_result() -> None:
    scores = torch.randn(4, 64, 128, device=DEVICE, requires_grad=True)
    mask = mask_of(scores)
    assert saved_bytes(partial(softmax, backend="triton"), scores, mask, causal=True) == scores.nbytes
    half = scores.detach().bfloat16().requires_grad_()
    assert saved_bytes(partial(softmax, backend="triton"), half, mask) == half.nbytes


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused_backward_saves_one_tensor_and_the_mask(backend: str) -> None:
    scores = torch.randn(4, 64, 128, requires_grad=True)
    mask = torch.ones(64, 128, dtype=torch.bool).tril()
    fused = fuse(lambda scores, mask: softmax(scores, mask, scale=0.5), backend=backend, fallback=())
    assert saved_bytes(fused, scores, mask) <= scores.nbytes + mask.nbytes + 2 * 4 * 64 * 4


def added(mask: Tensor) -> Tensor:
    """A floating mask that hides what a bool mask hides."""
    (values,) = tensors(mask.shape)
    return values.masked_fill(~mask, -math.inf)


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
@pytest.mark.parametrize("log", [False, True])
def test_an_additive_mask(log: bool, layout: str, form: Form) -> None:
    op = partial(log_softmax, backend=form.keywords["backend"]) if log else form
    of_mask = log_softmax_reference if log else softmax_reference
    mask = laid_out(layout)
    (scores,) = tensors(SCORES)
    assert_as_good_as(seen_of(op), seen_of(of_mask), [scores, added(mask)], causal=True, scale=0.5)


@pytest.mark.parametrize("masked", [False, True])
def test_log_softmax_is_torchs_and_hides(masked: bool, form: Form) -> None:
    op = partial(log_softmax, backend=form.keywords["backend"])
    (scores,) = tensors((4, 19))
    mask = mask_of(scores) if masked else torch.ones_like(scores, dtype=torch.bool)
    exact = scores.double().masked_fill(~mask, -math.inf).log_softmax(-1)
    scores[~mask] = torch.nan
    scores.requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        y = op(scores, mask if masked else None)
        loss = y.masked_fill(~mask, 0.0).square().sum()
        (dscores,) = torch.autograd.grad(loss, scores, create_graph=True)
        (second,) = torch.autograd.grad(dscores.square().sum(), scores)
    assert torch.equal(y == -math.inf, ~mask)
    torch.testing.assert_close(y[:3][mask[:3]].double(), exact[:3][mask[:3]], rtol=1e-5, atol=1e-6)
    for one in (dscores, second):
        assert torch.equal(one[~mask], torch.zeros_like(one[~mask]))
        assert bool(one[mask].isfinite().all())
        assert bool(one[mask].any())


def test_the_gradient_of_a_mask_alone() -> None:
    (scores, mask) = tensors((5, 6), (6,), dtype=torch.float64)
    for op in (softmax, log_softmax, softmax_reference, log_softmax_reference):
        assert torch.autograd.gradcheck(partial(op, scores, scale=0.3), mask.requires_grad_())
    form = partial(softmax, backend="triton" if INTERPRETED or DEVICE.type == "cuda" else "auto")
    narrow, leaf = scores.float(), mask.detach().float().requires_grad_()
    (got,) = torch.autograd.grad(form(narrow, leaf, scale=0.3).square().sum(), leaf)
    (wanted,) = torch.autograd.grad(softmax(scores, mask, scale=0.3).square().sum(), mask)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


def test_errors() -> None:
    scores = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"^scores must be a floating-point tensor, got torch.int64; convert it"):
        softmax(scores.long())
    with pytest.raises(ValueError, match=r"^scores must be \[..., N\], got a tensor without dimensions; give it one"):
        softmax(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"^mask must be a bool or floating tensor or None, got list$"):
        softmax(scores, [[True]])  # type: ignore[arg-type]
    wanted = "^mask must be bool, True where a score takes part, or floating, added to the scores, got torch.int64$"
    with pytest.raises(TypeError, match=wanted):
        softmax(scores, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"^mask must be a floating-point tensor of 16 bits at least, got torch.float8"):
        softmax(scores, torch.zeros(2, 3).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"^causal scores must be \[..., T, S\], queries by keys, got \[3\]; leave"):
        log_softmax(scores[0], causal=True)
    for shape, text in (((2,), r"\[2\]"), ((1, 2, 3), r"\[1, 2, 3\]"), ((3, 3), r"\[3, 3\]"), ((2, 0), r"\[2, 0\]")):
        wanted = rf"^mask must be broadcastable to scores' shape \[2, 3\], got {text}$"
        with pytest.raises(ValueError, match=wanted):
            softmax(scores, torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^mask must be on scores' device cpu, got meta; move it with .to\(sc"):
        softmax(scores, torch.ones(2, 3, dtype=torch.bool, device="meta"))
    with pytest.raises(ValueError, match=r"^causal scores must be \[..., T, S\], queries by keys, got \[3\]; leave"):
        softmax(scores[0], causal=True)
    for scale in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=rf"^scale must be a finite number, got {scale}$"):
            softmax(scores, scale=scale)
    for given, name in ((None, "NoneType"), (torch.ones(()), "Tensor"), ("1", "str")):
        with pytest.raises(TypeError, match=rf"^scale must be a finite number, got {name}; pass a float$"):
            softmax(scores, scale=given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^no backend 'tritn'; did you mean 'triton'\?"):
        softmax(scores, backend="tritn")
