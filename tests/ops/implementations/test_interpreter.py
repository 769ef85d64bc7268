import pytest
import torch

from fuselayers.ops.implementations.launch import INTERPRETED, kernel, launch
from fuselayers.ops.implementations.triton_language import tl

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(not INTERPRETED, reason="is about Triton's interpreter")]


@kernel
def _cast_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    tl.store(y_ptr + place, tl.load(x_ptr + place).to(y_ptr.dtype.element_ty))


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


def test_casts_between_8_bit_floats_and_bfloat16() -> None:
    narrow = torch.randn(16).to(torch.float8_e5m2)
    out = torch.empty(16, dtype=torch.bfloat16)
    launch(_cast_kernel, (1,), (narrow, out), (16,))
    assert torch.equal(out, narrow.bfloat16())
