"""sums -- sums over rows: in plain torch, and the last step of the backward kernels."""

import math
from typing import Final

import torch
from torch import Tensor

from .implementations.launch import kernel, launch
from .implementations.triton_language import tl
from .rows import cdiv, vector_of

__all__ = ["sum_of_rows", "sum_partials"]

# A tile is 128 rows of 128 bytes: narrow, so that a few thousand columns fill a GPU.
_BLOCK_ROWS: Final = 128
_BLOCK_COLUMNS: Final = 32


def sum_of_rows(x: Tensor) -> Tensor:
    """Return x, [..., N], summed over every dimension but the last, in float32 at least.

    >>> sum_of_rows(torch.ones(2, 3, 4))
    tensor([6., 6., 6., 6.])
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    # Not x.flatten, which does not support batched gradients.
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).sum(0, dtype=wide) if x.dim() > 1 else x.to(wide)


def sum_partials(partial: Tensor, sums: Tensor) -> None:
    """Write to `sums` the sum of `partial` over the P programs, rounded once to the dtype of `sums`.

    This is one kernel. A sum and a cast for each gradient would be up to four.

    Args:
        partial: [P, ...], float32, contiguous.
        sums: [...], contiguous.
    """
    assert sums.shape == partial.shape[1:]
    width = sums.numel()
    vector = vector_of(width)
    launch(
        _partials_kernel,
        (cdiv(width, _BLOCK_COLUMNS),),
        (partial, sums, len(partial), width // vector),
        (vector, _BLOCK_ROWS, _BLOCK_COLUMNS),
    )


@kernel
def _partials_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    sums_ptr,
    num_rows,
    num_columns,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    width = num_columns * VECTOR
    in_row = columns < width
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in tl.range(0, num_rows, BLOCK_ROWS, num_stages=3):
        rows = first + tl.arange(0, BLOCK_ROWS)
        place = rows.to(tl.int64)[:, None] * width + columns[None, :]
        total += tl.load(partial_ptr + place, mask=(rows < num_rows)[:, None] & in_row[None, :], other=0.0)
    tl.store(sums_ptr + columns, tl.sum(total, 0).to(sums_ptr.dtype.element_ty), mask=in_row)
