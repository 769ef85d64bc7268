"""Choose the combinations of parameters that run every day."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

__all__ = ["every_value"]


def every_value(*parameters: Sequence[Any]) -> list[Any]:
    """Return all combinations, and mark all but the daily ones as slow.

    There are as many daily combinations as the longest parameter has values. Every value occurs in them. They are
    chosen greedily, each for the most pairs of values that are not covered yet. For tests that compile or interpret,
    where a fault of a single combination is unlikely.

    >>> daily = [param.values for param in every_value("abc", (1, 2), (3, 4)) if not param.marks]
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
