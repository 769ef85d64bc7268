"""The registry: the names of components, their classes, and the options of each class.

A component is an `nn.Module` class registered under a kind and a name. Configs and callers name it by a `Choice`; the
options of a choice are the keyword-only arguments of the class's `__init__`.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeVar, get_type_hints

from torch import nn

from ..names import no_such
from ..other_names import ours_for
from .ranges import Range, marked, range_of

KINDS: Final = (
    "activation",
    "feedforward",
    "norm",
    "attention",
    "position",
    "embedding",
    "residual",
    "block",
    "model",
    "fused",
)

Registered = TypeVar("Registered", bound=type)

_OWNERS: dict[str, dict[str, type]] = {kind: {} for kind in KINDS}
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
# Note: [causal is the model's] A component that takes `causal` gets it from the model, whether or not its `built_in`
# lists it. Left at its default, attention in a causal model could silently see later tokens.
_KINDS_WITH_CAUSAL: Final = ("attention", "feedforward", "position", "block")
REQUIRED: Final = inspect.Parameter.empty
"""The default of an option that has none. It stays the same object through pickle and deepcopy."""


@dataclass(frozen=True)
class Choice:
    """The name of a component, with its options.

    The options are copied, so that nothing built from a choice can change the caller's dict.

    >>> Choice("mlp", {"expansion": 2.0})
    Choice(name='mlp', options={'expansion': 2.0})
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", dict(self.options))


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


def register(kind: str, name: str) -> Callable[[Registered], Registered]:
    """Decorate a class to own `name` among the components of `kind`.

    The class may list in `built_in: ClassVar[frozenset[str]]` the arguments that its builder fills in (a size, a
    backend, a nested choice); they are not options. Neither is `causal` of an attention, feedforward, position or
    block.

    Raises:
        ValueError: there is no such kind, the name is not in lower_case, or another class owns it.
        TypeError: the class is not a subclass of `nn.Module`.

    >>> from torch import nn
    >>> @register("norm", "no_norm_at_all")
    ... class NoNorm(nn.Identity):
    ...     pass
    >>> get("norm", "no_norm_at_all") is NoNorm
    True
    >>> unregister("norm", "no_norm_at_all")
    """
    owners = _owners(kind)
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name of a {kind} must be in lower_case letters, digits and underscores, got {name!r}")

    def own(component: Registered) -> Registered:
        if not (isinstance(component, type) and issubclass(component, nn.Module)):
            raise TypeError(f"{kind} {name!r} must be a subclass of nn.Module, got {component!r}")
        owner = owners.get(name)
        if owner is not None and not _is_defined_again(owner, component):
            raise ValueError(f"{kind} {name!r} belongs to {_path(owner)}; choose another name for {_path(component)}")
        owners[name] = component
        return component

    return own


def unregister(kind: str, name: str) -> None:
    """Free the name of a component, so that another class may own it. Used by tests.

    Raises:
        ValueError: there is no such kind or name.
    """
    get(kind, name)
    del _OWNERS[kind][name]


def names(kind: str) -> tuple[str, ...]:
    """Return the names of the components of a kind, sorted.

    Raises:
        ValueError: there is no such kind.

    >>> "mlp" in names("feedforward")
    True
    """
    return tuple(sorted(_owners(kind)))


def get(kind: str, name: str) -> type:
    """Return the class that owns `name`.

    Raises:
        ValueError: there is no such kind or name; the message lists the choices and the nearest one.

    >>> get("feedforward", "mlp").__name__
    'MLP'
    """
    owners = _owners(kind)
    if name not in owners:
        raise ValueError(no_such(kind, name, owners) + of_another_kind(kind, name))
    return owners[name]


def of_another_kind(kind: str, name: object) -> str:
    """Return the end of an error text: the other kind that has the name, or nothing.

    >>> of_another_kind("feedforward", "rms_norm")
    "; 'rms_norm' is of the kind norm"
    """
    others = [other for other, owners in _OWNERS.items() if name in owners and other != kind]
    return f"; {name!r} is of the kind {others[0]}" if others else ""


def title(component: object) -> str:
    """Return the name of a built component for error texts: kind and name, else its class.

    >>> title(create("norm", "layer_norm", 4)), title(object())
    ("norm 'layer_norm'", 'object')
    """
    for kind, owners in _OWNERS.items():
        for name, owner in owners.items():
            if type(component) is owner:
                return f"{kind} {name!r}"
    return type(component).__name__


def options(kind: str, name: str) -> tuple[Option, ...]:
    """Return the options of a component in the order of its signature.

    They are the keyword-only arguments of its `__init__`, without those that its builder fills in. A doc comes from the
    `Args:` in the docstring of the class or of a base class, so a subclass documents only the arguments it adds.

    Raises:
        ValueError: there is no such kind or name.

    >>> [option.name for option in options("norm", "layer_norm")]
    ['eps', 'bias']
    """
    return _options(kind, get(kind, name))


@cache
def _options(kind: str, component: type) -> tuple[Option, ...]:
    # Cached: reading a signature takes 0.2 ms, and composing one config asks for options 150 times.
    initialise = component.__init__  # type: ignore[misc]
    annotations = get_type_hints(initialise)
    hints = get_type_hints(initialise, include_extras=True)
    docs: dict[str, str] = {}
    for base in reversed(component.__mro__):
        docs |= _argument_docs(base)
    built_in = _built_in(kind, component)
    return tuple(
        Option(
            name=parameter.name,
            annotation=annotations.get(parameter.name, Any),
            default=parameter.default,
            doc=docs.get(parameter.name, ""),
            range=range_of(hints.get(parameter.name)),
            kind=_kind_of(parameter.name, hints.get(parameter.name)),
        )
        for parameter in inspect.signature(initialise).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in built_in
    )


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
            f"{option!r} of {kind} {name!r} ({_path(component)}) is not an option, since it is not keyword-only; "
            "write * before it in __init__"
        )
    others = [other for other in names(kind) if option in [known.name for known in options(kind, other)]]
    known = [own.name for own in options(kind, name)]
    text = no_such(f"{name} option", option, known, elsewhere=() if others else elsewhere)
    return f"{text}; {', '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else text


def is_shipped(component: type) -> bool:
    """Return whether a class is part of this library. For other classes errors also say how to change them."""
    return component.__module__.startswith("fuselayers.")


def as_choice(choice: Choice | str) -> Choice:
    """Return a choice unchanged, and a name as the choice of that name without options.

    Raises:
        TypeError: it is neither a name nor a `Choice`.

    >>> as_choice("mlp")
    Choice(name='mlp', options={})
    """
    if isinstance(choice, str):
        return Choice(choice)
    if not isinstance(choice, Choice):
        raise TypeError(
            "a component is given by its name or as a Choice, Choice('mlp', {'expansion': 2.0}), "
            f"got a {type(choice).__name__}; its sizes are arguments of create: create('feedforward', choice, 64)"
        )
    return choice


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


def create(kind: str, choice: Choice | str, *args: Any, **built_in: Any) -> Any:
    """Build the chosen component from its options, `args` and the arguments its builder fills in.

    Raises:
        ValueError: there is no such kind, name or option; a required option is missing; an argument is given twice; or
            the class does not take one of the `built_in` arguments.
        TypeError: the choice is neither a name nor a `Choice`, or the arguments do not fit the class.

    >>> create("norm", Choice("layer_norm", {"eps": 1e-6}), 4)
    LayerNorm(4, eps=1e-06, bias=True)
    """
    choice = as_choice(choice)
    component = get(kind, choice.name)
    known = {option.name: option for option in options(kind, choice.name)}
    for name in choice.options:
        if name not in known:
            raise ValueError(no_option(kind, choice.name, name))
        if name in built_in:
            raise ValueError(f"{choice.name} option {name!r} is set by the builder; leave it out of the options")
    parameters = _signature(component).parameters
    for name in built_in:
        if name not in parameters:
            meant = [ours for ours in ours_for(name) if ours in parameters]
            advice = f"; here it is {meant[0]}" if meant else ""
            raise ValueError(f"{kind} {choice.name!r} ({_path(component)}) does not take the argument {name!r}{advice}")
    for name, option in known.items():
        if option.default is REQUIRED and name not in choice.options and name not in built_in:
            meaning = f" ({option.doc})" if option.doc else ""
            raise ValueError(f"{kind} {choice.name!r} needs the option {name!r}{meaning}")
    try:
        _signature(component).bind(*args, **choice.options, **built_in)
    except TypeError as error:
        raise TypeError(
            f"{kind} {choice.name!r} ({_path(component)}) cannot be built: {error}; a builder gives the sizes of its "
            "kind by position, and options of a config must be keyword-only, after * in __init__"
        ) from error
    return component(*args, **choice.options, **built_in)


def check_base(kind: str, choice: Choice | str, base: type) -> None:
    """Raise TypeError unless the chosen class is a subclass of `base`, whose methods the builder calls.

    Used for residual styles and positions.
    """
    name = as_choice(choice).name
    if not issubclass(get(kind, name), base):
        raise TypeError(f"{kind} {name!r} ({_path(get(kind, name))}) must be a subclass of components.{base.__name__}")


def _owners(kind: str) -> dict[str, type]:
    if kind not in _OWNERS:
        raise ValueError(no_such("kind", kind, KINDS))
    return _OWNERS[kind]


def _kind_of(name: str, annotation: Any) -> str | None:
    component = marked(annotation, Component)
    if component is None:
        return name if name in KINDS else None
    _owners(component[1].kind)  # raises for a misspelt kind
    return component[1].kind


_signature = cache(inspect.signature)


def _built_in(kind: str, component: type) -> frozenset[str]:
    listed: frozenset[str] = getattr(component, "built_in", frozenset())
    # See Note: [causal is the model's].
    if kind in _KINDS_WITH_CAUSAL and "causal" in _signature(component).parameters:
        listed |= {"causal"}
    return listed


def _path(component: type) -> str:
    return f"{component.__module__}.{component.__qualname__}"


def _is_defined_again(owner: type, component: type) -> bool:
    # A notebook cell that runs twice, or a module that is reloaded, defines its class twice; the later one replaces the
    # first. A function may define several classes with the same path.
    in_a_function = component.__module__ != "__main__" and "<locals>" in component.__qualname__
    return _path(owner) == _path(component) and not in_a_function


def _argument_docs(component: type) -> dict[str, str]:
    """Return the entries of the `Args:` section of a class's own docstring: argument -> text on one line."""
    _, _, section = inspect.cleandoc(component.__dict__.get("__doc__") or "").partition("Args:\n")
    docs: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        entry = re.fullmatch(r" {4}(\w+): (.*)", line)
        if entry:
            name = entry[1]
            docs[name] = entry[2].strip()
        elif name and line.startswith(" " * 8):
            docs[name] += f" {line.strip()}"
        else:
            break
    return docs
