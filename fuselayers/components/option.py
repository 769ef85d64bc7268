"""The options of components and config sections: described once, by a signature, and judged once, by `judged`.

    def __init__(self, hidden_dim: Size, *, dropout: Probability = 0.0) -> None

The annotation gives an option's type and range, the default its default, and `Args:` in the docstring its meaning (or a
text in the annotation, as in `Annotated[Size, "the steps"]`). Configs, `create` and a direct call of a class `@checked`
all judge by this description, and the tables of the docs show it. `create` and direct calls judge each argument of the
class that is made; the constructors of its base classes judge nothing again.
"""

# Note: [why not pydantic or structured configs]
# pydantic 2.14 could judge types and ranges in place of `judged_value` and its two helpers. Its errors take four
# lines, without path, nearest choice or the component that has the option, so each would be translated: with the same
# texts it saved 2 of 895 lines. Strict, it refuses numpy's whole numbers, and lists for tuples; lax, it reads "4" as a
# number. It is another dependency, with 0.06 s of import (2 CPU cores). The structured configs of OmegaConf 2.3, which
# Hydra 1.3 needs, read "4" as a number, 1 as true and 3 as text, and know no ranges, no Literal and no `Choice | str`.
# They judge while Hydra merges, and would refuse a swap that must work: llama_tiny sets multiple_of, which
# feedforward=mlp does not have.

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Final, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from ..names import no_such, shown
from ..other_names import ours_for
from .registry import KINDS, Choice, as_choice, get, is_shipped, names, path_of

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
Mark = TypeVar("Mark")

REQUIRED: Final = inspect.Parameter.empty
"""The default of an option that has none. It stays the same object through pickle and deepcopy."""

# Note: [causal is the model's] A component that takes `causal` gets it from the model, whether or not its `built_in`
# lists it. Left at its default, attention in a causal model could silently see later tokens.
_KINDS_WITH_CAUSAL: Final = ("attention", "feedforward", "position", "block")
_INTEGERS_BELOW: Final = 2**63  # torch's sizes
_MISFIT: Final = object()
_signature: Final = functools.cache(inspect.signature)


class OptionTypeError(TypeError, ValueError):
    """An option has another type: a TypeError for a call, a ValueError for a config, where all errors are."""


@dataclass(frozen=True)
class Range:
    """The bounds of a finite number; infinity and nan are in no range.

    >>> str(Range(minimum=0, below=1))
    'at least 0 and below 1'
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        bounds = {"at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)

    def check(self, name: str, value: float) -> None:
        """Raise ValueError unless `value` is finite and within the bounds."""
        finite = isinstance(value, int) or math.isfinite(value)  # an int may be too large for a float
        if not (
            finite
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        ):
            wanted = " and ".join(filter(None, (str(self), "" if finite else "finite")))
            raise ValueError(f"{name} must be {wanted}, got {shown(value)}")


Size = Annotated[int, Range(minimum=1)]
Count = Annotated[int, Range(minimum=0)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(minimum=0)]
Probability = Annotated[float, Range(minimum=0, maximum=1)]
Decay = Annotated[float, Range(minimum=0, below=1)]
Share = Annotated[float, Range(above=0, maximum=1)]


@dataclass(frozen=True)
class Component:
    """Marks an option that holds a component, if the option's name is not the kind.

    `expert: Annotated[Choice | str, Component("feedforward")]` is a feedforward with its own options, in a config too;
    with `Annotated[str, ...]` it is only the name of a feedforward. An option named after a kind, such as `block`,
    needs no mark.
    """

    kind: str


@dataclass(frozen=True)
class Option:
    """One option of a component: its name, type, default (or REQUIRED) and meaning.

    A number has a range. An option that holds or names a component has that component's kind.
    """

    name: str
    annotation: Any
    default: Any
    doc: str
    range: Range | None = None
    kind: str | None = None
    # From the others: the members of a union (of any other annotation, the annotation alone); an entry of a tuple of
    # any length; and the kind of the component that it holds with its own options.
    alternatives: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    entry: "Option | None" = field(init=False, repr=False, compare=False)
    holds: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_union = get_origin(self.annotation) in (Union, UnionType)
        alternatives = get_args(self.annotation) if is_union else (self.annotation,)
        lists = [get_args(alternative)[0] for alternative in alternatives if get_origin(alternative) is tuple]
        entry = Option(self.name, lists[0], REQUIRED, "", self.range, self.kind) if lists else None
        object.__setattr__(self, "alternatives", alternatives)
        object.__setattr__(self, "entry", entry)
        object.__setattr__(self, "holds", self.kind if Choice in alternatives else None)


@functools.cache  # reading a signature takes 0.2 ms
def described(function: Callable[..., Any]) -> Mapping[str, Option]:
    """Return the arguments of a function or class, without self, *args and **kwargs, as options: name -> option.

    >>> described(Choice)["name"].annotation
    <class 'str'>
    """
    initialise = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    annotations, hints = get_type_hints(initialise), get_type_hints(initialise, include_extras=True)
    docs: dict[str, str] = {}
    for source in reversed(function.__mro__) if isinstance(function, type) else [function]:
        docs |= _argument_docs(source.__dict__.get("__doc__") or "" if isinstance(source, type) else source.__doc__)
    return {
        parameter.name: Option(
            name=parameter.name,
            annotation=annotations.get(parameter.name, Any),
            default=parameter.default,
            doc=_mark(hints.get(parameter.name), str) or docs.get(parameter.name, ""),
            range=_mark(hints.get(parameter.name), Range),
            kind=_kind_of(parameter.name, hints.get(parameter.name)),
        )
        for parameter in _signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and parameter.name != "self"
    }


def _mark(annotation: Any, mark: type[Mark]) -> Mark | None:
    """Return the mark of `Annotated[type, mark]`, also in a union; None without a mark of this class."""
    for part in (annotation, *get_args(annotation)):
        for extra in getattr(part, "__metadata__", ()):
            if isinstance(extra, mark):
                return extra
    return None


def _kind_of(name: str, annotation: Any) -> str | None:
    component = _mark(annotation, Component)
    if component is None:
        return name if name in KINDS else None
    names(component.kind)  # raises for a misspelt kind
    return component.kind


def _argument_docs(docstring: str | None) -> dict[str, str]:
    """Return the entries of the `Args:` section of a docstring: argument -> text on one line."""
    docs: dict[str, str] = {}
    name = ""
    lines = inspect.cleandoc(docstring or "").splitlines()
    section = lines[lines.index("Args:") + 1 :] if "Args:" in lines else []
    indent = len(section[0]) - len(section[0].lstrip()) if section else 0
    for line in section:
        depth = len(line) - len(line.lstrip())
        if not line.strip() or depth < indent:
            break
        if depth == indent:
            name, _, text = line.strip().partition(": ")
            docs[name] = text
        else:
            docs[name] += f" {line.strip()}"
    return docs


def options(kind: str, name: str) -> tuple[Option, ...]:
    """Return the options of a component in the order of its signature.

    They are the keyword-only arguments of its `__init__`, without those that its builder fills in. A doc comes from the
    `Args:` in the docstring of the class or of a base class, so a subclass documents only the arguments it adds.

    Raises:
        ValueError: there is no such kind or name.

    >>> [option.name for option in options("norm", "layer_norm")]
    ['eps', 'bias']
    """
    return tuple(options_of(kind, name).values())


def options_of(kind: str, name: str) -> Mapping[str, Option]:
    """Return the options of a component, as `options` does: name -> option."""
    return _options(kind, get(kind, name))


@functools.cache
def _options(kind: str, component: type) -> Mapping[str, Option]:
    parameters, built_in = _signature(component).parameters, _built_in(kind, component)
    return {
        name: option
        for name, option in described(component).items()
        if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY and name not in built_in
    }


def judged(
    values: Mapping[str, Any],
    options: Mapping[str, Option],
    *,
    owner: str,
    where: str = "",
    unknown: Callable[[str], str] = str,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the values of options, each checked and converted: an int to a float, a list to a tuple.

    This is the one judge of names, missing values, types and ranges. Configs, `create` and direct calls use it.

    Args:
        values: option -> value.
        options: option -> its description.
        owner: what has the options, for error texts: "feedforward 'mlp'".
        where: the path of the options in a config, for error texts: "feedforward".
        unknown: returns the error text for a name that is no option.
        before: values that need no second judgement.

    Raises:
        ValueError: an option is unknown, is missing, is out of range or names no registered component.
        OptionTypeError: an option has another type.

    >>> judged({"eps": 1}, described(create), owner="", unknown="no option {}".format)
    Traceback (most recent call last):
    ValueError: no option eps
    """
    for name in values:
        if name not in options:
            raise ValueError(unknown(name))
    result = {}
    for name, option in options.items():
        if name in values:
            value = values[name]
            is_known = before is not None and before.get(name, _MISFIT) is value
            result[name] = value if is_known else judged_value(f"{where}.{name}" if where else name, value, option)
        elif option.default is REQUIRED:
            meaning = f" ({option.doc})" if option.doc else ""
            advice = f"; set {where}.{name}=" if where else ""
            raise ValueError(f"{owner} needs the option {name!r}{meaning}{advice}")
    return result


def judged_value(where: str, value: Any, option: Option) -> Any:
    """Return a value, checked against an option's type and range and converted, as `judged` does.

    It judges bool, int, float, str, None, Literal, tuples of any length, and unions. The component checks other types.

    Raises:
        ValueError, OptionTypeError: as `judged`.
    """
    if option.entry is not None and isinstance(value, (list, tuple)):
        return tuple(judged_value(f"{where}[{index}]", item, option.entry) for index, item in enumerate(value))
    for alternative in option.alternatives:
        fitted = _fitted(value, alternative)
        if fitted is not _MISFIT:
            break
    else:
        raise _misfit(where, value, option.alternatives)
    if alternative is int and abs(fitted) >= _INTEGERS_BELOW:
        raise ValueError(f"{where} must be below 2**63, got {shown(fitted)}")
    if alternative in (int, float):
        (option.range or Range()).check(where, value)
    elif option.kind is not None and isinstance(fitted, str):
        get(option.kind, fitted)
    return fitted


def _fitted(value: Any, wanted: Any) -> Any:
    """Return a value as the wanted type, or _MISFIT. Any library's numbers fit, but True is no number."""
    if get_origin(wanted) is Literal:
        fits = any(type(value) is type(name) and value == name for name in get_args(wanted))
    elif wanted in (int, float):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if wanted is int else numbers.Real):
            return _MISFIT
        try:
            return wanted(value)
        except OverflowError:  # an int may be too large for a float
            return _MISFIT
    elif wanted in (bool, str, type(None), Choice):
        fits = isinstance(value, wanted)
    else:
        fits = get_origin(wanted) is not tuple
    return value if fits else _MISFIT


def _misfit(where: str, value: Any, wanted: Sequence[Any]) -> Exception:
    """Return the error for a value of another type. A dotted path is of a config, whose words are those of YAML."""
    names_of = [name for alternative in wanted if get_origin(alternative) is Literal for name in get_args(alternative)]
    if names_of and isinstance(value, str):
        return ValueError(no_such(where, value, names_of))
    in_config = "." in where
    words: dict[Any, str] = {bool: "true or false" if in_config else "True or False", int: "a whole number"}
    words |= {float: "a number", str: "text", type(None): "null" if in_config else "None"}
    if Choice in wanted:
        words[Choice] = "a name or a mapping of options" if in_config else "a name or Choice(NAME, OPTIONS)"
        wanted = [alternative for alternative in wanted if alternative is not str]
    parts = [words.get(alternative, "a list") for alternative in wanted if get_origin(alternative) is not Literal]
    parts += [f"one of {', '.join(map(str, names_of))}"] if names_of else []
    hint = ""
    if in_config and str in wanted and isinstance(value, (bool, int, float)):
        hint = "; quote it to make it text, with two pairs of quotes on a command line"
    elif in_config and isinstance(value, str) and any(get_origin(alternative) is tuple for alternative in wanted):
        hint = f"; write [{value}]"
    return OptionTypeError(f"{where} must be {' or '.join(parts)}, got {shown(value)}{hint}")


def checked(function: Callable[Arguments, Returned], *, where: str = "") -> Callable[Arguments, Returned]:
    """Decorate a function, usually an `__init__`, to judge its arguments. Every component with options uses it.

    An argument of another type raises TypeError; a number out of its range, or an unknown name, raises ValueError.

    >>> class Layer:
    ...     @checked
    ...     def __init__(self, *, num_heads: Size) -> None: ...
    >>> Layer(num_heads=0)
    Traceback (most recent call last):
    ValueError: num_heads must be at least 1, got 0
    >>> Layer(num_heads=2.5)
    Traceback (most recent call last):
    fuselayers.components.option.OptionTypeError: num_heads must be a whole number, got 2.5
    """
    signature = inspect.signature(function)
    is_method = function.__name__ == "__init__"

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        # A subclass has judged what it passes on.
        of_class = getattr(type(args[0]), "__init__", None) if is_method and args else None
        if of_class is not call and hasattr(of_class, "unchecked"):
            return function(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(_unfit(function, signature, args, kwargs, error)) from None
        known = described(function)
        values = {name: value for name, value in bound.arguments.items() if name in known}
        bound.arguments |= judged(values, known, owner=function.__qualname__, where=where)
        return function(*bound.args, **bound.kwargs)

    call.unchecked = function  # type: ignore[attr-defined]
    return call


def construct(component: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `component(*args, **kwargs)` for arguments that are judged already."""
    initialise = getattr(component.__init__, "unchecked", None)
    if initialise is None:
        return component(*args, **kwargs)
    instance = component.__new__(component)
    initialise(instance, *args, **kwargs)
    return instance


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


def no_option(kind: str, name: str, option: str, *, elsewhere: Sequence[str] = ()) -> str:
    """Return the text of an error: the component has no such option, and options that may have been meant.

    Args:
        kind: the component's kind.
        name: the component's name.
        option: the option that it does not have.
        elsewhere: paths of a config that have the option.

    >>> no_option("norm", "skip", "eps")
    "no skip option 'eps'; there are none; layer_norm, rms_norm have it"
    """
    component = get(kind, name)
    if option == "causal" and kind in _KINDS_WITH_CAUSAL:
        return f"{option!r} is not an option of {kind} {name!r}: the model sets it (a decoder to True); leave it out"
    parameter = _signature(component).parameters.get(option)
    if parameter is not None and parameter.kind is parameter.POSITIONAL_OR_KEYWORD and not is_shipped(component):
        return (
            f"{option!r} of {kind} {name!r} ({path_of(component)}) is not an option, since it is not keyword-only; "
            "write * before it in __init__"
        )
    others = [other for other in names(kind) if option in options_of(kind, other)]
    text = no_such(f"{name} option", option, options_of(kind, name), elsewhere=() if others else elsewhere)
    return f"{text}; {', '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else text


def accepted(kind: str, choice: Choice | str, **values: Any) -> dict[str, Any]:
    """Return the `values` that the builder of the chosen class fills in: those in its `built_in`, and `causal`.

    A builder offers some arguments, such as a fusion backend, to every component of a kind, but only some take them. A
    component that takes `causal` gets it without listing it. If it must support `causal`, as attention in a causal
    model, the builder calls `attention.inputs.check_able` first.

    >>> accepted("feedforward", "mlp", backend="eager"), accepted("feedforward", "fused_mlp", backend="eager")
    ({}, {'backend': 'eager'})
    """
    built_in = _built_in(kind, get(kind, as_choice(choice).name))
    return {name: value for name, value in values.items() if name in built_in}


@functools.cache
def _built_in(kind: str, component: type) -> frozenset[str]:
    listed: frozenset[str] = getattr(component, "built_in", frozenset())
    # See Note: [causal is the model's].
    if kind in _KINDS_WITH_CAUSAL and "causal" in _signature(component).parameters:
        listed |= {"causal"}
    return listed


def create(kind: str, choice: Choice | str, *args: Any, **built_in: Any) -> Any:
    """Build the chosen component from its options, `args` and the arguments its builder fills in.

    Raises:
        ValueError: there is no such kind, name or option; a required option is missing; an argument is given twice or
            is out of range; or the class does not take one of the `built_in` arguments.
        TypeError: the choice is neither a name nor a `Choice`, an argument has another type, or the arguments do not
            fit the class.

    >>> create("norm", Choice("layer_norm", {"eps": 1e-6}), 4)
    LayerNorm(4, eps=1e-06, bias=True)
    """
    choice = as_choice(choice)
    component = get(kind, choice.name)
    title, known, own = f"{kind} {choice.name!r}", described(component), options_of(kind, choice.name)
    for name in built_in:
        if name in choice.options and name in own:
            raise ValueError(f"{choice.name} option {name!r} is set by the builder; leave it out of the options")
        if name not in _signature(component).parameters:
            meant = [ours for ours in ours_for(name) if ours in known]
            advice = f"; here it is {meant[0]}" if meant else ""
            raise ValueError(f"{title} ({path_of(component)}) does not take the argument {name!r}{advice}")
    by_builder = {**dict(zip(known, args, strict=False)), **built_in}
    arguments = judged(
        {**choice.options, **by_builder},
        {name: option for name, option in known.items() if name in own or name in by_builder},
        owner=title,
        unknown=functools.partial(no_option, kind, choice.name),
        before=choice.judged,
    )
    try:
        bound = _signature(component).bind(*args, **choice.options, **built_in)
    except TypeError as error:
        raise TypeError(
            f"{title} ({path_of(component)}) cannot be built: {error}; a builder gives the sizes of its "
            "kind by position, and options of a config must be keyword-only, after * in __init__"
        ) from error
    bound.arguments |= arguments
    return construct(component, *bound.args, **bound.kwargs)
