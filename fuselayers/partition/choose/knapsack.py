"""The 0/1 knapsack problem by dynamic programming."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

_MOST_CELLS: Final = 1 << 16


def knapsack(sizes: Sequence[int], values: Sequence[float], capacity: int) -> list[int]:
    """Return the indices of the items that are worth most together and fit, in ascending order.

    Exact where the capacity is at most 65,536 times the greatest common divisor of the sizes, which holds for tensors
    of few different shapes; else sizes are rounded up to multiples of capacity / 65,536, so that the choice still fits.

    >>> knapsack([3, 2, 2], [4.0, 3.0, 3.0], 4)
    [1, 2]
    """
    if capacity <= 0 or not sizes:
        return []
    cell = max(math.gcd(*sizes), math.ceil(capacity / _MOST_CELLS))
    room = capacity // cell
    cells = [-(-size // cell) for size in sizes]
    best = np.zeros(room + 1)
    improved: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
    for size, value in zip(cells, values, strict=True):
        better = np.zeros(room + 1, dtype=np.bool_)
        if size <= room and value > 0:
            with_item = best[: room + 1 - size] + value
            better[size:] = with_item > best[size:]
            best[size:] = np.maximum(best[size:], with_item)
        improved.append(better)
    chosen: list[int] = []
    for index in range(len(cells) - 1, -1, -1):
        if improved[index][room]:
            chosen.append(index)
            room -= cells[index]
    return chosen[::-1]
