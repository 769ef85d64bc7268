"""Which combinations of parameters run every day."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

__all__ = ["every_value"]


def every_value(*parameters: Sequence[Any]) -> list[Any]:
    """All combinations; slow but for as many as the longest parameter has values, in which each value occurs.

    Those have as many pairs of values as one finds by taking the best one after the other. For tests that compile or
    interpret, where a fault of one combination alone is unlikely.

    >>> daily = [one.values for one in every_value("abc", (1, 2), (3, 4)) if not one.marks]
    >>> daily
    [('a', 1, 3), ('b', 2, 4), ('c', 1, 4)]
    """
    lengths = [len(values) for values in parameters]
    longest = lengths.index(max(lengths))
    daily: set[tuple[int, ...]] = set()
    seen: set[Any] = set()
    for turn in range(lengths[longest]):
        left = [range(turn, turn + 1) if at == longest else range(length) for at, length in enumerate(lengths)]
        best = max(product(*left), key=lambda places: len(_values_and_pairs(places) - seen))
        daily.add(best)
        seen |= _values_and_pairs(best)
    return [
        pytest.param(
            *(values[place] for values, place in zip(parameters, places, strict=True)),
            marks=() if places in daily else pytest.mark.slow,
        )
        for places in product(*(range(len(values)) for values in parameters))
    ]


def _values_and_pairs(places: tuple[int, ...]) -> set[Any]:
    return set(combinations(enumerate(places), 2)) | set(enumerate(places))
