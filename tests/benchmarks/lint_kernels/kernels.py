"""Cases whose kernels are good or bad in a known way, and the mark of tests that compile."""

import pytest
import torch
from torch import Tensor

from benchmarks.lint_kernels.cases import ROWS, Case
from fuselayers.ops.implementations.launch import INTERPRETED, kernel, launch
from fuselayers.ops.implementations.triton_language import HAS_TRITON, tl

compiles = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="compiles kernels with Triton")


@kernel
def _doubling_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, num_rows, num_columns, VECTOR: tl.constexpr, TURNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    place = tl.program_id(0).to(tl.int64) * (num_columns * VECTOR) + columns
    live = columns < num_columns * VECTOR
    x = tl.load(x_ptr + place, mask=live, other=0.0).to(tl.float32)
    for _ in tl.static_range(TURNS):
        x = x * x + 1.0
    tl.store(y_ptr + place, x.to(y_ptr.dtype.element_ty), mask=live)


@kernel
def _hoarding_kernel(x_ptr, y_ptr, BLOCK_COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    x = tl.load(x_ptr + place).to(tl.float32)
    tl.store(y_ptr + place, (x / tl.sum(x, 0)).to(y_ptr.dtype.element_ty))


def _doubling(case: Case, *, vector: int, turns: int = 1) -> Tensor:
    x = case.tensor(ROWS, case.width)
    grid = x.shape[0], x.shape[1] // 2048
    launch(_doubling_kernel, grid, (x, torch.empty_like(x), x.shape[0], x.shape[1] // vector), (vector, turns, 2048))
    return x


def _hoarding(case: Case) -> Tensor:
    x = case.tensor(ROWS, case.width)
    launch(_hoarding_kernel, (x.shape[0],), (x, torch.empty_like(x)), (x.shape[1],))
    return x


GOOD = Case("good", "", 4096, torch.bfloat16, lambda case: _doubling(case, vector=8))
NARROW = Case("narrow", "", 4096, torch.bfloat16, lambda case: _doubling(case, vector=1))
SLOW = Case("slow", "", 4096, torch.bfloat16, lambda case: _doubling(case, vector=8, turns=40))
SPILLING = Case("spilling", "", 32768, torch.float32, _hoarding)
