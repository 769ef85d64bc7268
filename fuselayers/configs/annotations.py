"""Values against annotations: what fits, what is converted, and the text of what does not."""

import math
import types
from typing import Any, Literal, Union, get_args, get_origin

from ..names import no_such

__all__ = ["alternatives", "checked"]


def checked(where: str, value: Any, annotation: Any) -> Any:
    """Return the value as the annotation has it: an int as a float where a float is wanted, a list as a tuple.

    Args:
        where: the value's place, for the error text: "feedforward.expansion".
        value: a plain value.
        annotation: bool, int, float, str, None, Literal, a tuple of any length, or a union of these. Any other type is
            its component's own to check.

    Raises:
        ValueError: the value does not fit.

    >>> checked("feedforward.expansion", 4, float)
    4.0
    >>> checked("feedforward.expansion", "four", float)
    Traceback (most recent call last):
    ValueError: feedforward.expansion must be a number, got 'four'
    """
    wanted = alternatives(annotation)
    for alternative in wanted:
        fits, fitted = _fit(where, value, alternative)
        if fits:
            return fitted
    literals = [name for alternative in wanted if get_origin(alternative) is Literal for name in get_args(alternative)]
    if literals and isinstance(value, str):
        raise ValueError(no_such(where, value, literals))
    hint = ""
    if str in wanted and isinstance(value, (bool, int, float)):
        hint = "; in quotes it is text, on a command line in two pairs of them"
    elif isinstance(value, str) and any(map(_is_any_length, wanted)):
        hint = f"; write [{value}]"
    raise ValueError(f"{where} must be {' or '.join(map(_in_words, wanted))}, got {value!r}{hint}")


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, and anything else as the only one."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _fit(where: str, value: Any, annotation: Any) -> tuple[bool, Any]:
    """Return whether the value fits, and what it becomes."""
    if annotation in (None, type(None)):
        return value is None, value
    if get_origin(annotation) is Literal:
        return any(type(value) is type(name) and value == name for name in get_args(annotation)), value
    if _is_any_length(annotation):
        if not isinstance(value, (list, tuple)):
            return False, value
        entry, _ = get_args(annotation)
        return True, tuple(checked(f"{where}[{place}]", item, entry) for place, item in enumerate(value))
    if annotation is float:
        number = _number(value)
        return number is not None, number
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return annotation not in (bool, str) or isinstance(value, annotation), value


def _is_any_length(annotation: Any) -> bool:
    return get_origin(annotation) is tuple and get_args(annotation)[1:] == (Ellipsis,)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _in_words(annotation: Any) -> str:
    if annotation in (None, type(None)):
        return "null"
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if _is_any_length(annotation):
        return "a list"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return words[annotation]
