"""The meter counts bytes and finds faulty kernels."""

import pytest
import torch

from fuselayers.ops.implementations.launch import INTERPRETED, kernel, launch
from fuselayers.ops.implementations.triton_language import tl
from tests.testing.meter import KernelFault, Launch, metered

interpreted = [pytest.mark.kernels, pytest.mark.skipif(not INTERPRETED, reason="is about Triton's interpreter")]


@kernel
def _copy_kernel(x_ptr, y_ptr, size, first, step, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < size
    x = tl.load(x_ptr + first + place, mask=live, other=0.0)
    tl.store(y_ptr + place * step, x, mask=live)


@kernel
def _copy_rows_kernel(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.program_id(0) * BLOCK + column, tl.load(x_ptr + tl.program_id(0) * stride + column))


@kernel
def _last_row_wins_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + place))


@kernel
def _swap_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK) * 2
    x, y = tl.load(x_ptr + place), tl.load(y_ptr + place)
    tl.store(x_ptr + place, y)
    tl.store(y_ptr + place, x)


@kernel
def _both_kernel(x_ptr, a_ptr, b_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    tl.store(a_ptr + place, x)
    tl.store(b_ptr + place, x)


@kernel
def _add_up_kernel(x_ptr, sum_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(sum_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + place))


@pytest.mark.kernels
class TestCounts:
    pytestmark = interpreted

    def test_lanes_that_are_masked_are_not_counted(self) -> None:
        x, y = torch.randn(21), torch.empty(21)
        with metered() as launches:
            launch(_copy_kernel, (2,), (x, y, 21, 0, 1), (16,))
        assert torch.equal(x, y)
        (copied,) = launches
        assert copied == Launch("_copy_kernel", loaded=84, stored=84, programs=2)

    def test_views_of_one_storage_are_told_apart(self) -> None:
        both = torch.arange(16.0)
        with metered() as launches:
            launch(_swap_kernel, (1,), (both[0::2], both[1::2]), (8,))
        assert both.view(8, 2)[:, 0].tolist() == [1, 3, 5, 7, 9, 11, 13, 15]
        assert launches == [Launch("_swap_kernel", loaded=64, stored=64, programs=1)]


@pytest.mark.kernels
class TestFaults:
    pytestmark = interpreted

    def test_a_load_past_the_end(self) -> None:
        x, y = torch.randn(40)[:21], torch.empty(24)
        text = (
            r"^_copy_kernel loads x_ptr \[21\] at element 21 of its memory, which is not one of the tensor's, in "
            r"program \(1, 0, 0\)$"
        )
        with pytest.raises(KernelFault, match=text), metered():
            launch(_copy_kernel, (2,), (x, y, 22, 0, 1), (16,))

    def test_a_load_between_the_rows(self) -> None:
        x, y = torch.randn(4, 24)[:, :16], torch.empty(4, 16)
        with metered():
            launch(_copy_rows_kernel, (4,), (x, y, 24), (16,))
        assert torch.equal(x, y)
        with pytest.raises(KernelFault, match=r"^_copy_rows_kernel loads x_ptr \[4, 16\] at element 16 of"), metered():
            launch(_copy_rows_kernel, (4,), (x, y, 16), (16,))

    def test_two_programs_that_store_to_one_address(self) -> None:
        text = (
            r"^_last_row_wins_kernel stores to y_ptr \[16\] at element 0 of its memory twice, in program \(0, 0, 0\) "
            r"and in program \(0, 1, 0\)$"
        )
        with metered() as launches:
            launch(_last_row_wins_kernel, (1, 1), (torch.randn(48), torch.empty(16)), (16,))
        assert len(launches) == 1
        with pytest.raises(KernelFault, match=text), metered():
            launch(_last_row_wins_kernel, (1, 3), (torch.randn(48), torch.empty(16)), (16,))

    def test_two_arguments_that_share_memory(self) -> None:
        x, y = torch.randn(16), torch.empty(17)
        with metered():
            launch(_both_kernel, (1,), (x, y[:16], torch.empty(16)), (16,))
        text = (
            r"^_both_kernel stores to b_ptr \[16\] at element 0 of its memory twice, in program \(0, 0, 0\) through "
            r"a_ptr and in program \(0, 0, 0\)$"
        )
        for other in (y[:16], y[1:]):
            with pytest.raises(KernelFault, match=text), metered():
                launch(_both_kernel, (1,), (x, y[:16], other), (16,))

    def test_an_atomic_operation(self) -> None:
        with pytest.raises(KernelFault, match=r"^_add_up_kernel is not deterministic: it uses an atomic"), metered():
            launch(_add_up_kernel, (2,), (torch.randn(32), torch.zeros(16)), (16,))
