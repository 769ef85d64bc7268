from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import pytest

from fuselayers.configs.annotations import checked

HUGE = 10**400


@pytest.mark.parametrize(
    ("value", "annotation", "fitted"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (0.5, float, 0.5),
        (True, bool, True),
        ("a", str, "a"),
        ("", str, ""),
        (None, int | None, None),
        (3, int | None, 3),
        (3, Optional[float], 3.0),  # noqa: UP045 (a user may write it)
        (3, Union[str, float], 3.0),  # noqa: UP007
        ("a", Literal["a", "b"], "a"),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        ((1, 2), tuple[float, ...], (1.0, 2.0)),
        ([], tuple[str, ...], ()),
        ([1, 2], tuple[int, int], [1, 2]),
        ({"a": 1}, dict[str, int], {"a": 1}),
        ("f", Callable[[], int], "f"),
        ("anything", Any, "anything"),
    ],
)
def test_what_fits(value: Any, annotation: Any, fitted: Any) -> None:
    result = checked("x.y", value, annotation)
    assert result == fitted
    assert type(result) is type(fitted)


@pytest.mark.parametrize(
    ("value", "annotation", "text"),
    [
        (3.0, int, "x.y must be a whole number, got 3.0"),
        (True, int, "x.y must be a whole number, got True"),
        ("3", int, "x.y must be a whole number, got '3'"),
        (None, int, "x.y must be a whole number, got None"),
        (True, float, "x.y must be a number, got True"),
        (float("nan"), float, "x.y must be a number, got nan"),
        (float("inf"), float | None, "x.y must be a number or null, got inf"),
        (HUGE, float, f"x.y must be a number, got {HUGE}"),
        (1, bool, "x.y must be true or false, got 1"),
        ("true", bool, "x.y must be true or false, got 'true'"),
        (5, str, "x.y must be text, got 5; in quotes it is text, on a command line in two pairs of them"),
        (None, str, "x.y must be text, got None"),
        ("c", Literal["a", "b"], "no x.y 'c'; there are: a, b"),
        (1, Literal["a", "b"], "x.y must be one of a, b, got 1"),
        (True, Literal[1, 2], "x.y must be one of 1, 2, got True"),
        ("a", tuple[str, ...], "x.y must be a list, got 'a'; write [a]"),
        (["a", 1], tuple[str, ...], "x.y[1] must be text, got 1; in quotes it is text"),
        ({"a": 1}, str | None, "x.y must be text or null, got {'a': 1}"),
    ],
)
def test_what_does_not_fit(value: Any, annotation: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        checked("x.y", value, annotation)
    assert text in str(caught.value)
