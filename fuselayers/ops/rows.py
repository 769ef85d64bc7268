"""rows -- memory as [R, N] rows, cut into tiles. Used by every op with kernels.

VECTOR    8 where the width and the row strides are multiples of 8, else 1. The kernels receive both divided by VECTOR
          and multiply again. That tells the compiler that it can load and store eight neighbours at once; from the
          number alone Triton infers divisibility by 16 only.
"""

import functools
from typing import Final, NamedTuple

import torch
from torch import Tensor

from .implementations.triton_language import tile_function, tl

__all__ = [
    "WARPS_WITH_SUMS",
    "ElementwisePlan",
    "as_rows",
    "cdiv",
    "column_tile",
    "elementwise_plan",
    "next_power_of_2",
    "tile_of_rows",
    "vector_of",
]

# The tile of a program with four warps: 32 elements per thread, in 16 bits four loads of 128 bits.
_TILE_BYTES: Final = 8192
_WIDEST: Final = 2048
MOST_PROGRAMS: Final = 65535  # the limit of a grid in y and in z; in x it is 2**31 - 1
LONGEST_ROW: Final = 1 << 15
"""The longest row that a kernel of whole rows takes: of longer ones the registers hold too little."""
_MOST_ELEMENTS_OF_FOUR_WARPS: Final = 4096
_MOST_WARPS: Final = 32 if torch.version.hip is None else 16  # 1024 threads
WARPS_WITH_SUMS: Final = 16
"""Warps per processor of a persistent kernel that writes sums. They load fast enough; more would write more sums."""
_ELEMENTS: Final = 2048
_ELEMENTS_OF_A_WARP: Final = 512


class ElementwisePlan(NamedTuple):
    """The tiling of an elementwise kernel.

    Attributes:
        grid: tiles of rows; tiles of columns in y and z, see `column_tile`.
        sizes: rows, columns over VECTOR, and the strides over VECTOR.
        constants: VECTOR, BLOCK_ROWS, BLOCK_COLUMNS.
    """

    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    constants: tuple[int, int, int]


@functools.lru_cache(maxsize=4096)
def elementwise_plan(itemsize: int, num_rows: int, num_columns: int, *strides: int) -> ElementwisePlan:
    """Return the plan for tensors of `num_rows` x `num_columns` with these row strides.

    Args:
        itemsize: bytes per element of the first tensor.

    >>> elementwise_plan(4, 512, 4096, 4096)
    ElementwisePlan(grid=(512, 2, 1), sizes=(512, 512, 512), constants=(8, 1, 2048))
    """
    vector = vector_of(num_columns, *strides)
    block_columns = min(next_power_of_2(max(num_columns, 8)), _WIDEST)
    block_rows = min(max(_TILE_BYTES // max(itemsize, 2) // block_columns, 1), next_power_of_2(num_rows))
    column_tiles = cdiv(num_columns, block_columns)
    layers = cdiv(column_tiles, MOST_PROGRAMS)
    return ElementwisePlan(
        (cdiv(num_rows, block_rows), cdiv(column_tiles, layers), layers),
        (num_rows, num_columns // vector, *(stride // vector for stride in strides)),
        (vector, block_rows, block_columns),
    )


@tile_function
def column_tile():  # type: ignore[no-untyped-def]
    """Return the tile of columns of a program in an `ElementwisePlan`; the last tiles may lie beyond the row."""
    return tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)


def as_rows(x: Tensor) -> Tensor:
    """Return x, [..., N] and not empty, as [R, N] with contiguous rows; copies only if it must.

    >>> import torch
    >>> as_rows(torch.zeros(2, 3, 8)).shape
    torch.Size([6, 8])
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def vector_of(num_columns: int, *strides: int) -> int:
    """Return VECTOR for tensors of `num_columns` columns and these row strides."""
    return 1 if num_columns % 8 or any(stride % 8 for stride in strides) else 8


@functools.lru_cache(maxsize=4096)
def tile_of_rows(num_rows: int, num_columns: int) -> tuple[int, int, int]:
    """Return the tile of a kernel that needs whole rows: rows, columns, number of warps. Used by the norms.

    >>> tile_of_rows(64, 1000), tile_of_rows(1, 9000)
    ((2, 1024, 4), (1, 16384, 32))
    """
    columns = next_power_of_2(max(num_columns, 8))
    rows = max(1, min(_ELEMENTS // columns, next_power_of_2(num_rows)))
    # Two programs of four warps overlap better than one of eight, though a few registers spill: on an H100 the backward
    # of a norm with dropout takes 116 us, with eight warps 158 (8192 x 4096, bfloat16, Triton 3.6).
    if rows * columns <= _MOST_ELEMENTS_OF_FOUR_WARPS:
        return rows, columns, 4
    # Rows of more than 8192 columns were compiled for sm_90 (Triton 3.7, bfloat16), and not measured on a GPU. Bytes
    # that a thread spills, in forward and backward:
    #
    #                                 16 warps       32 warps
    #     rms_norm           16384       0    56        0    56
    #                        32768      80  1816       64   496
    #     all options        16384     232  1136      160   360      bias_dropout_residual_layer_norm, prenorm
    #                        32768     856  3928      520  1232
    return rows, columns, min(rows * columns // _ELEMENTS_OF_A_WARP, _MOST_WARPS)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below `number`.

    >>> [next_power_of_2(number) for number in (1, 2, 3, 1000)]
    [1, 2, 4, 1024]
    """
    return 1 << max(number - 1, 0).bit_length()


def cdiv(number: int, by: int) -> int:
    """Return number / by, rounded up.

    >>> cdiv(7, 4)
    2
    """
    return -(-number // by)
