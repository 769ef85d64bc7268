from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.ops.implementations.interpreter import patch_interpreter
from fuselayers.ops.implementations.launch import INTERPRETED, kernel, launch
from fuselayers.ops.implementations.triton_language import tl

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(not INTERPRETED, reason="is about Triton's interpreter")]


@kernel
def _cast_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    tl.store(y_ptr + place, tl.load(x_ptr + place).to(y_ptr.dtype.element_ty))


@kernel
def _dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    tile = place[:, None] * SIZE + place[None, :]
    tl.store(out_ptr + tile, tl.dot(tl.load(a_ptr + tile), tl.load(b_ptr + tile)))


@kernel
def _arithmetic_kernel(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + place), tl.load(y_ptr + place)
    tl.store(out_ptr + place, x + y)
    tl.store(out_ptr + SIZE + place, x * y)
    tl.store(out_ptr + 2 * SIZE + place, x - y)
    tl.store(out_ptr + 3 * SIZE + place, x * 1.5 + 2)
    tl.store(out_ptr + 4 * SIZE + place, tl.fma(x, y, x))
    tl.store(out_ptr + 5 * SIZE + place, -tl.abs(x))
    tl.store(out_ptr + 6 * SIZE + place, tl.where(x < y, x, y))
    tl.store(out_ptr + 7 * SIZE + place, (x < y).to(tl.bfloat16))


@kernel
def _collective_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    x = tl.load(x_ptr + place)
    tl.store(out_ptr + place, tl.zeros_like(x) + tl.sum(x))
    tl.store(out_ptr + SIZE + place, tl.zeros_like(x) + tl.max(x))
    tl.store(out_ptr + 2 * SIZE + place, tl.associative_scan(x, 0, tl.standard._sum_combine))
    tl.store(out_ptr + 3 * SIZE + place, tl.associative_scan(x, 0, tl.standard._sum_combine, reverse=True))
    tl.store(out_ptr + 4 * SIZE + place, tl.associative_scan(x, 0, tl.standard._prod_combine))
    tl.store(out_ptr + 5 * SIZE + place, tl.sort(x))


@pytest.mark.parametrize("wide", [torch.float32, torch.float16])
def test_bfloat16_is_rounded_to_the_nearest_as_torch_does(wide: torch.dtype) -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    x = torch.cat([special, torch.randn(120)]).to(wide)
    y = torch.empty(128, dtype=torch.bfloat16)
    launch(_cast_kernel, (1,), (x, y), (128,))
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    back = torch.empty(128, dtype=wide)
    launch(_cast_kernel, (1,), (y, back), (128,))
    torch.testing.assert_close(back, y.to(wide), rtol=0, atol=0, equal_nan=True)


def test_a_matmul_of_bfloat16() -> None:
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    out = torch.empty(16, 16)
    launch(_dot_kernel, (1,), (a, b, out), (16,))
    torch.testing.assert_close(out, a.float() @ b.float())


def test_arithmetic_of_bfloat16_is_that_of_torch() -> None:
    x, y = torch.randn(16).bfloat16(), torch.randn(16).bfloat16()
    out = torch.empty(8, 16, dtype=torch.bfloat16)
    launch(_arithmetic_kernel, (1,), (x, y, out), (16,))
    fma = (x.double() * y.double() + x.double()).bfloat16()
    lesser = torch.where(x < y, x, y)
    wanted = torch.stack([x + y, x * y, x - y, x * 1.5 + 2, fma, -x.abs(), lesser, (x < y).bfloat16()])
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)


def test_sums_and_an_order_of_bfloat16() -> None:
    x = torch.randn(8).bfloat16()
    out = torch.empty(6, 8, dtype=torch.bfloat16)
    launch(_collective_kernel, (1,), (x, out), (8,))

    def running(values: Tensor, combine: Any) -> list[Tensor]:
        found = [values[0]]
        for value in values[1:]:
            found.append(combine(found[-1], value))  # rounded each time
        return found

    sums = torch.stack(running(x, torch.add))
    backwards = torch.stack(running(x.flip(0), torch.add)).flip(0)
    products = torch.stack(running(x, torch.mul))
    wanted = [sums[-1:].expand(8), x.max().expand(8), sums, backwards, products, x.sort().values]
    torch.testing.assert_close(out, torch.stack(wanted), rtol=0, atol=0)


def test_casts_between_8_bit_floats_and_bfloat16() -> None:
    narrow = torch.randn(16).to(torch.float8_e5m2)
    out = torch.empty(16, dtype=torch.bfloat16)
    launch(_cast_kernel, (1,), (narrow, out), (16,))
    assert torch.equal(out, narrow.bfloat16())


def test_patching_twice_changes_nothing() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    patch_interpreter()
    mended = InterpreterBuilder.cast_impl
    patch_interpreter()
    assert InterpreterBuilder.cast_impl is mended
