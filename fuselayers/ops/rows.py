"""rows -- how the kernels of this folder look at memory: as [R, N] rows, cut into tiles. Used by every op with kernels.

VECTOR    8 where the width and the distances between rows are multiples of 8, else 1. The kernels are given both
          divided by it and multiply again, which is how the compiler learns that eight neighbours can be loaded and
          stored at once; from the number alone it would learn it for multiples of 16 only.
"""

from typing import Final

from torch import Tensor

from .forms.launch import INTERPRETED

__all__ = ["as_rows", "cdiv", "next_power_of_2", "persistent_programs", "tile", "tile_of_rows", "vector_of"]

# What a program of four warps works on: 32 elements a thread, in 16 bits four loads of 128 bits.
_TILE_BYTES: Final = 8192
_WIDEST: Final = 2048
# Of a kernel that needs a whole row at once.
_LONGEST_ROW: Final = 8192
_PIECE: Final = 4096
_ELEMENTS: Final = 2048
_ELEMENTS_OF_A_WARP: Final = 512


def as_rows(x: Tensor) -> Tensor:
    """Return x, [..., N] and not empty, as [R, N] with the elements of a row side by side; it is copied at need.

    >>> import torch
    >>> as_rows(torch.zeros(2, 3, 8)).shape
    torch.Size([6, 8])
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def vector_of(*rows: Tensor) -> int:
    """Return VECTOR for tensors [R, N] that a kernel goes through together."""
    return 8 if all(one.shape[1] % 8 == 0 and one.stride(0) % 8 == 0 for one in rows) else 1


def tile(rows: Tensor) -> tuple[int, int]:
    """Return (rows, columns) of the tile that one program of an elementwise kernel works on.

    >>> import torch
    >>> tile(torch.zeros(512, 4096)), tile(torch.zeros(512, 60))
    ((1, 2048), (32, 64))
    """
    elements = _TILE_BYTES // max(rows.element_size(), 2)
    columns = min(next_power_of_2(max(rows.shape[1], 8)), _WIDEST)
    return min(max(elements // columns, 1), next_power_of_2(rows.shape[0])), columns


def tile_of_rows(rows_RN: Tensor) -> tuple[bool, int, int, int]:
    """Return, for a kernel that needs whole rows, if they are taken in pieces, the tile's rows and columns, and warps.

    Used by the norms and by softmax.

    >>> import torch
    >>> tile_of_rows(torch.zeros(64, 1000)), tile_of_rows(torch.zeros(1, 9000))
    ((False, 2, 1024, 4), (True, 1, 4096, 8))
    """
    columns = next_power_of_2(max(rows_RN.shape[1], 8))
    if columns > _LONGEST_ROW:
        return True, 1, _PIECE, _PIECE // _ELEMENTS_OF_A_WARP
    rows = max(1, min(_ELEMENTS // columns, next_power_of_2(rows_RN.shape[0])))
    return False, rows, columns, max(4, columns * rows // _ELEMENTS_OF_A_WARP)


def persistent_programs(num_tiles: int, *, processors: int, num_warps: int = 4, side_by_side: int = 1) -> int:
    """Return how many programs share `num_tiles` tiles in turn, `side_by_side` such groups running at a time.

    16 warps of a kernel that keeps its sums in registers are about what a processor holds; a program that would have to
    wait for its turn had better leave its tiles to the others.
    """
    each = 1 if INTERPRETED else max(16 // num_warps, 1)
    return max(1, min(num_tiles, each * processors // side_by_side))


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below `number`.

    >>> [next_power_of_2(number) for number in (1, 2, 3, 1000)]
    [1, 2, 4, 1024]
    """
    return 1 << max(number - 1, 0).bit_length()


def cdiv(number: int, by: int) -> int:
    """Return how many parts of size `by` cover `number`.

    >>> cdiv(7, 4)
    2
    """
    return -(-number // by)
