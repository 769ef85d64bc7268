from collections.abc import Callable

import pytest
import torch

from fuselayers.ops import rotary
from fuselayers.ops.rotary import rotary_reference
from tests.ops.contract import (
    DTYPES,
    assert_as_good_as,
    check_autocast,
    check_dynamic,
    check_fused,
    check_layouts,
    check_mixed_dtypes,
    check_poisoned,
    check_single_gradients,
    tensors,
)


def angles(tokens: int, channels: int) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    return torch.arange(tokens, dtype=torch.float64)[:, None] * frequency


def inputs_of(tokens: int, channels: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    table = (tokens, channels // 2)
    return tensors((2, 3, tokens, channels), (2, 1, tokens, channels), table, table, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1, 2), (5, 8), (7, 130), (0, 4)], ids=str)
def test_matches_reference(size: tuple[int, int], dtype: torch.dtype) -> None:
    assert_as_good_as(rotary, rotary_reference, inputs_of(*size, dtype))


def one_table(q: torch.Tensor, k: torch.Tensor, angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary(q, k, angle, angle)


def one_table_reference(q: torch.Tensor, k: torch.Tensor, angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary_reference(q, k, angle, angle)


@pytest.mark.parametrize("check", [check_layouts, check_single_gradients, check_autocast, check_poisoned])
def test_contract(check: Callable[..., None]) -> None:
    check(rotary, rotary_reference, inputs_of(6, 10))


def test_mixed_dtypes() -> None:
    check_mixed_dtypes(one_table, one_table_reference, inputs_of(6, 10)[:3])  # cos and sin must have one dtype


def test_dynamic_shapes() -> None:
    check_dynamic(rotary, rotary_reference, lambda shape: inputs_of(shape[0], 2 * shape[1]))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_fused(backend: str) -> None:
    check_fused(rotary, rotary_reference, inputs_of(5, 8), backend=backend)


def test_gradcheck_of_the_reference() -> None:
    inputs = [value.requires_grad_() for value in inputs_of(2, 4, torch.float64)]
    assert torch.autograd.gradcheck(rotary_reference, inputs)


def test_a_narrow_table_does_not_make_the_rotation_narrow() -> None:
    q, k, cos, sin = inputs_of(5, 8)
    got = rotary(q, k, cos.bfloat16(), sin.bfloat16())
    torch.testing.assert_close(got, rotary(q, k, cos, sin), rtol=0, atol=0)  # these angles are exact in bfloat16


def test_is_a_complex_rotation() -> None:
    q = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    k = torch.randn(2, 1, 5, 8, dtype=torch.float64)
    angle = angles(5, 8)
    for got, x in zip(rotary(q, k, angle.cos(), angle.sin()), (q, k), strict=True):
        turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1))


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    angle = angles(12, 8)
    turned_q, turned_k = rotary(q.expand(1, 1, 12, 8), k.expand(1, 1, 12, 8), angle.cos(), angle.sin())
    scores = (turned_q @ turned_k.mT)[0, 0]
    for distance in range(-3, 4):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_keeps_the_dtype_and_rotates_in_float32() -> None:
    q = torch.randn(1, 2, 5, 8).bfloat16()
    angle = angles(5, 8).float()
    got, _ = rotary(q, q, angle.cos(), angle.sin())
    exact, _ = rotary(q.double(), q.double(), angle.double().cos(), angle.double().sin())
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_gradcheck() -> None:
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    angle = angles(3, 4)
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, angle.cos(), angle.sin()), (q, k))


def test_errors() -> None:
    q = torch.ones(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"^rotary needs an even number of channels per head, got 3$"):
        rotary(q[..., :3], q[..., :3], torch.ones(3, 1), torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"^k must end in \[3, 4\] to fit q \[1, 1, 3, 4\], got \[1, 1, 2, 4\]$"):
        rotary(q, q[:, :, :2], torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"^cos must be \[3, 2\] to fit q \[1, 1, 3, 4\], got \[3, 4\]$"):
        rotary(q, q, torch.ones(3, 4), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"^q must be \[..., T, C\], tokens by channels, got \[4\]$"):
        rotary(q[0, 0, 0], q[0, 0, 0], torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"^k must be \[1, heads, 3, 4\] to fit q \[1, 1, 3, 4\], got \[7, 1, 3, 4\]$"):
        rotary(q, q.expand(7, 1, 3, 4), torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"^k must be \[1, heads, 3, 4\] to fit q \[1, 1, 3, 4\], got \[1, 3, 4\]$"):
        rotary(q, q[0], torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"^k must be \[3, 4\] to fit q \[3, 4\], got \[1, 3, 4\]$"):
        rotary(q[0, 0], q[0], torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(
        ValueError, match=r"^sin must have cos's dtype torch.float32, got torch.float64; convert it with"
    ):
        rotary(q, q, torch.ones(3, 2), torch.ones(3, 2).double())
    with pytest.raises(ValueError, match=r"^cos must be on q's device cpu, got meta; move it with .to\(q.device\)$"):
        rotary(q, q, torch.ones(3, 2, device="meta"), torch.ones(3, 2, device="meta"))
    with pytest.raises(TypeError, match=r"^cos must be a floating-point tensor, got torch.int64; convert it"):
        rotary(q, q, torch.ones(3, 2, dtype=torch.int64), torch.ones(3, 2))
