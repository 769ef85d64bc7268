"""Which combinations of parameters run every day."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

__all__ = ["every_value"]


def every_value(*parameters: Sequence[Any]) -> list[Any]:
    """All combinations; slow but for as many as the longest parameter has values, in which each value occurs.

    For tests that compile, whose combinations differ in nothing that their values do not show alone.

    >>> daily = [one.values for one in every_value("abc", (1, 2)) if not one.marks]
    >>> daily
    [('a', 1), ('b', 2), ('c', 1)]
    """
    turns = range(max(map(len, parameters)))
    daily = {tuple(turn % len(values) for values in parameters) for turn in turns}
    return [
        pytest.param(
            *(values[place] for values, place in zip(parameters, places, strict=True)),
            marks=() if places in daily else pytest.mark.slow,
        )
        for places in product(*(range(len(values)) for values in parameters))
    ]
