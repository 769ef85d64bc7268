from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops import rotary
from fuselayers.ops.implementations.launch import INTERPRETED
from fuselayers.ops.rotary import rotary_reference
from fuselayers.partition import saved_bytes
from fuselayers.testing import (
    DTYPES,
    assert_as_good_as,
    check_autocast,
    check_double_backward,
    check_fused,
    check_layouts,
    check_not_finite,
    check_poisoned,
    check_single_gradients,
    check_transforms,
)
from tests.ops.contract import DEVICE, both_backends, every_backend, on_cpp, on_kernels, on_triton, tensors
from tests.testing.meter import Launch

both_pairings = pytest.mark.parametrize("interleaved", [False, True])

# Heads of a multiple of eight pairs, of four, of an odd number; a part of the channels turned; a table per sequence.
SIZES: dict[str, dict[str, Any]] = {
    "one pair": {"tokens": 1, "channels": 2},
    "eight channels": {"tokens": 5, "channels": 8},
    "odd pairs": {"tokens": 7, "channels": 10},
    "sixty-four": {"tokens": 3, "channels": 64},
    "eighty": {"tokens": 3, "channels": 80},
    "ninety-six": {"tokens": 3, "channels": 96},
    "odd and wide": {"tokens": 7, "channels": 130},
    "wide": {"tokens": 2, "channels": 256},
    "a quarter": {"tokens": 5, "channels": 64, "pairs": 8},
    "an odd part": {"tokens": 5, "channels": 11, "pairs": 3},
    "own tables": {"tokens": 5, "channels": 32, "own_tables": True},
    "own tables of a part": {"tokens": 5, "channels": 24, "pairs": 4, "own_tables": True},
    "no tokens": {"tokens": 0, "channels": 4},
    # The kernel in C++ takes heads in groups of four, and tokens in blocks of 64.
    "groups": {"tokens": 70, "channels": 6, "heads": 6},
}


def angles(tokens: int, channels: int) -> Tensor:
    frequency = 10000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    return torch.arange(tokens, dtype=torch.float64)[:, None] * frequency


def inputs_of(
    tokens: int,
    channels: int,
    dtype: torch.dtype = torch.float32,
    *,
    pairs: int | None = None,
    own_tables: bool = False,
    heads: int = 3,
) -> list[Tensor]:
    table = (*((2,) if own_tables else ()), tokens, channels // 2 if pairs is None else pairs)
    return tensors((2, heads, tokens, channels), (2, 1, tokens, channels), table, table, dtype=dtype)


def form(backend: str) -> Callable[..., Any]:
    return partial(rotary, backend=backend)


def turned(x: Tensor, angle: Tensor, *, interleaved: bool) -> Tensor:
    """The truth: each pair of channels is a complex number, multiplied by exp(i angle)."""
    pairs = torch.arange(angle.shape[-1])
    real, imaginary = (2 * pairs, 2 * pairs + 1) if interleaved else (pairs, pairs + len(pairs))
    product = torch.complex(x[..., real], x[..., imaginary]) * torch.polar(torch.ones_like(angle), angle)
    y = x.clone()
    y[..., real], y[..., imaginary] = product.real, product.imag
    return y


def every_size() -> Iterator[Any]:
    for name, size in SIZES.items():
        for dtype in DTYPES:
            yield pytest.param(size, dtype, "eager", id=f"{name}-{dtype}-eager")
            if dtype != torch.float64:
                # Triton takes one dtype for all sizes, and all dtypes for some.
                daily = dtype == torch.bfloat16 or name in ("sixty-four", "an odd part")
                marks = (on_kernels,) if daily else (on_kernels, pytest.mark.slow)
                yield pytest.param(size, dtype, "triton", id=f"{name}-{dtype}-triton", marks=marks)
                yield pytest.param(size, dtype, "cpp", id=f"{name}-{dtype}-cpp", marks=on_cpp.marks)


@both_pairings
@pytest.mark.parametrize(("size", "dtype", "backend"), every_size())
def test_matches_the_reference(size: dict[str, Any], dtype: torch.dtype, backend: str, interleaved: bool) -> None:
    q, k, cos, sin = inputs_of(dtype=dtype, **size)
    assert_as_good_as(form(backend), rotary_reference, [q, k, cos, sin], interleaved=interleaved)
    if backend == "cpp":
        by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
        assert_as_good_as(form(backend), rotary_reference, [*by_token, cos, sin], interleaved=interleaved)


# Each backend has a kernel for pairs of neighbours, and one for pairs of halves.
@every_backend
@pytest.mark.parametrize(
    ("check", "interleaved"),
    [
        pytest.param(check_layouts, False, marks=pytest.mark.slow),
        (check_layouts, True),
        *product((check_single_gradients, check_autocast, check_poisoned), (False, True)),
    ],
)
def test_contract(check: Callable[..., None], interleaved: bool, backend: str) -> None:
    check(form(backend), rotary_reference, inputs_of(6, 16, pairs=6), interleaved=interleaved)


@every_backend
@both_pairings
def test_second_derivatives_transforms_nan_and_inf(interleaved: bool, backend: str) -> None:
    call = (form(backend), rotary_reference, inputs_of(5, 12, pairs=4))
    assert check_double_backward(*call, interleaved=interleaved) is None
    check_not_finite(*call, interleaved=interleaved)
    said = check_transforms(*call, interleaved=interleaved)
    assert said is None if backend == "eager" else f"backend '{backend}' cannot take this call" in str(said)


@both_backends
@both_pairings
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused(compiler: str, interleaved: bool, backend: str) -> None:
    inputs = inputs_of(5, 12, pairs=4)
    check_fused(form(backend), rotary_reference, inputs, backend=compiler, interleaved=interleaved)


@both_pairings
def test_gradcheck(interleaved: bool) -> None:
    inputs = [value.requires_grad_() for value in inputs_of(2, 6, torch.float64, pairs=2)]
    assert torch.autograd.gradcheck(partial(rotary, interleaved=interleaved), inputs)
    assert torch.autograd.gradgradcheck(partial(rotary, interleaved=interleaved), inputs)


@both_backends
@both_pairings
@pytest.mark.parametrize("channels", [8, 20])
def test_is_a_complex_rotation(channels: int, interleaved: bool, backend: str) -> None:
    q, k = torch.randn(2, 3, 5, channels), torch.randn(2, 1, 5, channels)
    angle = angles(5, 8)
    tables = angle.cos().float().to(DEVICE), angle.sin().float().to(DEVICE)
    got = rotary(q.to(DEVICE), k.to(DEVICE), *tables, interleaved=interleaved, backend=backend)
    for turned_x, x in zip(got, (q, k), strict=True):
        expected = turned(x.double(), angle, interleaved=interleaved)
        torch.testing.assert_close(turned_x.cpu().double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(turned_x[..., 8:].cpu(), x[..., 8:])


@on_kernels
@both_pairings
@pytest.mark.parametrize("pairs", [32, 8])
def test_strided_heads_are_not_copied_and_results_have_the_layout_of_attention(
    pairs: int, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, cos, sin = tensors((2, 5, 5 * 64), (5, pairs), (5, pairs))

    def heads(packed: Tensor) -> tuple[Tensor, Tensor]:
        q, k, _ = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in packed.split([192, 64, 64], dim=-1))
        return q, k

    def form(packed: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return rotary(*heads(packed), cos, sin, **options)

    def reference(packed: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return rotary_reference(*heads(packed), cos.to(packed), sin.to(packed), **options)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "contiguous", lambda x: pytest.fail("copied"))
        turned = form(packed, interleaved=interleaved, backend="triton")
    for y in turned:
        assert y.transpose(1, 2).is_contiguous()
    for y in rotary(*(x.contiguous() for x in heads(packed)), cos, sin, backend="triton"):
        assert y.is_contiguous()
    assert_as_good_as(partial(form, backend="triton"), reference, [packed], interleaved=interleaved)


@pytest.mark.parametrize("backend", [on_cpp, on_triton])
def test_kernels_save_the_tables_and_heads_if_the_tables_need_gradients(backend: str) -> None:
    inputs = inputs_of(64, 32)
    q, k, cos, sin = (value.nbytes for value in inputs)
    keeps = partial(saved_bytes, form(backend))
    assert keeps(inputs[0].requires_grad_(), *inputs[1:]) == cos + sin
    assert keeps(inputs[0], inputs[1].requires_grad_(), *inputs[2:]) == cos + sin
    assert keeps(*inputs[:3], inputs[3].requires_grad_()) == q + k + cos + sin


def test_errors() -> None:
    q = torch.ones(1, 1, 3, 4)
    table = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"^rotary needs at least two channels per head, got q \[1, 1, 3, 1\]$"):
        rotary(q[..., :1], q[..., :1], torch.ones(3, 1), torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"^k must end in \[3, 4\] to fit q \[1, 1, 3, 4\], got \[1, 1, 2, 4\]$"):
        rotary(q, q[:, :, :2], table, table)
    with pytest.raises(ValueError, match=r"^q must be \[..., T, C\], tokens by channels, got \[4\]$"):
        rotary(q[0, 0, 0], q[0, 0, 0], torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"^k must be \[1, heads, 3, 4\] to fit q \[1, 1, 3, 4\], got \[7, 1, 3, 4\]$"):
        rotary(q, q.expand(7, 1, 3, 4), table, table)
    with pytest.raises(ValueError, match=r"^k must be \[3, 4\] to fit q \[3, 4\], got \[1, 3, 4\]$"):
        rotary(q[0, 0], q[0], table, table)
    with pytest.raises(
        ValueError, match=r"^sin must have cos's dtype torch.float32, got torch.float64; convert it with"
    ):
        rotary(q, q, table, table.double())
    with pytest.raises(ValueError, match=r"^sin must have cos's shape \[3, 2\], got \[3, 1\]$"):
        rotary(q, q, table, table[:, :1])
    with pytest.raises(ValueError, match=r"^cos must be on q's device cpu, got meta; move it with .to\(q.device\)$"):
        rotary(q, q, table.to("meta"), table.to("meta"))


@pytest.mark.parametrize("shape", [(3, 3), (3, 0), (2, 2), (2, 3, 2), (2,), ()], ids=str)
def test_errors_of_tables(shape: tuple[int, ...]) -> None:
    q, table = torch.ones(1, 1, 3, 4), torch.ones(shape)
    wanted = r"cos must be \[3, R\] or \[1, 3, R\], R from 1 to 2, to fit q \[1, 1, 3, 4\]"
    got = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ValueError, match=rf"^{wanted}, got {got}$"):
        rotary(q, q, table, table)
    if len(shape) == 2:
        wanted = r"cos must be \[3, R\], R from 1 to 2, to fit q \[1, 3, 4\]"
        with pytest.raises(ValueError, match=rf"^{wanted}, got {got}$"):
            rotary(q[0], q[0], table, table)


@on_kernels
@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter counts bytes")
@both_pairings
def test_the_kernel_moves_the_floor_in_one_launch(interleaved: bool, launches: list[Launch]) -> None:
    q, k = (value.requires_grad_() for value in tensors((2, 16, 8, 32), (2, 8, 8, 32), dtype=torch.bfloat16))
    cos, sin = tensors((8, 16), (8, 16))
    outputs = rotary(q, k, cos, sin, interleaved=interleaved, backend="triton")
    torch.autograd.grad(outputs, (q, k), [torch.ones_like(output) for output in outputs])
    assert len(launches) == 2
    heads = q.nbytes + k.nbytes
    for one_launch in launches:
        # A token's tables are loaded once per sequence and eight heads, and at most once per head.
        tables = (cos.nbytes + sin.nbytes) * 2
        assert 2 * heads + tables <= one_launch.loaded + one_launch.stored <= 2 * heads + tables * 24
