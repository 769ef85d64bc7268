"""The allowed range of a number, stated once, in the annotation of its argument.

`dropout: Probability` gives the type, the check, the error text and the entry in the tables of the docs.
"""

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

from ..names import no_such, shown

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
Mark = TypeVar("Mark")


@dataclass(frozen=True)
class Range:
    """The bounds of a finite number; infinity and nan are in no range.

    >>> str(Range(minimum=0, below=1)), 1.0 in Range(minimum=0, below=1)
    ('at least 0 and below 1', False)
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            _is_finite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {"at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)

    def check(self, name: str, value: float) -> None:
        """Raise ValueError unless `value` is within the bounds."""
        if value not in self:
            finite = "" if _is_finite(value) else " and finite"
            raise ValueError(f"{name} must be {self}{finite}, got {shown(value)}")


def _is_finite(value: float) -> bool:
    # An int is finite, even if it is too large for a float.
    return isinstance(value, int) or math.isfinite(value)


Size = Annotated[int, Range(minimum=1)]
Count = Annotated[int, Range(minimum=0)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(minimum=0)]
Probability = Annotated[float, Range(minimum=0, maximum=1)]
Decay = Annotated[float, Range(minimum=0, below=1)]
Share = Annotated[float, Range(above=0, maximum=1)]


def range_of(annotation: Any) -> Range | None:
    """Return the range that an annotation carries, itself or in a member of its union.

    >>> range_of(Size | None)
    Range(minimum=1, above=None, maximum=None, below=None)
    """
    number = marked(annotation, Range)
    return None if number is None else number[1]


def marked(annotation: Any, mark: type[Mark]) -> tuple[Any, Mark] | None:
    """Return the type and the mark of `Annotated[type, mark]`, also in a union; None without a mark of this class.

    Used for ranges and for options that hold a component.
    """
    for part in (annotation, *get_args(annotation)):
        for extra in getattr(part, "__metadata__", ()):
            if isinstance(extra, mark):
                return part.__origin__, extra
    return None


def _may_be_none(annotation: Any) -> bool:
    """Return whether an annotation names None: `Size | None`, or `Annotated[int | None, Range(...)]`."""
    return any(type(None) in (part, *get_args(part)) for part in get_args(annotation))


def _check_number(name: str, value: Any, kind: Any) -> None:
    """Raise TypeError unless `value` is a number of that type. Any integer type, such as numpy's, is an int."""
    wanted, words = (numbers.Integral, "whole number") if kind is int else (numbers.Real, "number")
    # True is a number in Python; as a size it is a mistake.
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise TypeError(f"{name} must be a {words}, got {shown(value)}")


def in_range(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Decorate a function, usually an `__init__`, to check each argument with an annotated range.

    An argument that is not a number of the annotated type, integer or real, raises TypeError; a number out of its range
    raises ValueError. None is valid where the annotation says so. Used by every component with a number among its
    options.

    >>> class Layer:
    ...     @in_range
    ...     def __init__(self, *, num_heads: Size) -> None: ...
    >>> Layer(num_heads=0)
    Traceback (most recent call last):
    ValueError: num_heads must be at least 1, got 0
    >>> Layer(num_heads=2.5)
    Traceback (most recent call last):
    TypeError: num_heads must be a whole number, got 2.5
    """
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        # Not at import: an annotation may name a later definition.
        return get_type_hints(function, include_extras=True)

    @functools.wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(_unfit(function, signature, args, kwargs, error)) from None
        for name, value in bound.arguments.items():
            hint = hints().get(name)
            number = marked(hint, Range)
            if number is not None and not (value is None and _may_be_none(hint)):
                kind, bounds = number
                _check_number(name, value, kind)
                bounds.check(name, value)
        return function(*args, **kwargs)

    return checked


def _unfit(function: Callable[..., Any], signature: inspect.Signature, args: Any, kwargs: Any, error: TypeError) -> str:
    """Return the error text for a call that does not fit a signature: the name called and the arguments it takes."""
    is_class = function.__name__ == "__init__" and args
    title = type(args[0]).__name__ if is_class else function.__qualname__
    parameters = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    known = [parameter.name for parameter in parameters]
    unknown = [name for name in kwargs if name not in known]
    if unknown:
        return no_such(f"{title} argument", unknown[0], known)
    first = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    by_name = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    takes = [", ".join(first)] if first else []
    takes += [f"by name {', '.join(by_name)}"] if by_name else []
    return f"{title}: {error}; it takes {', and '.join(takes) or 'nothing'}"
