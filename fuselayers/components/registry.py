"""The registry: the names of components, and their classes.

A component is an `nn.Module` class registered under a kind and a name. Configs and callers name it by a `Choice`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from torch import nn

from ..names import no_such

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


@dataclass(frozen=True)
class Choice:
    """The name of a component, with its options.

    The options are copied, so that nothing built from a choice can change the caller's dict.

    Attributes:
        name: the registered name.
        options: the values of some options.
        judged: the options that `compose` has judged. `create` judges only the others, so that a model of many layers
            judges each value once.

    >>> Choice("mlp", {"expansion": 2.0})
    Choice(name='mlp', options={'expansion': 2.0})
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    judged: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", dict(self.options))


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
            raise ValueError(
                f"{kind} {name!r} belongs to {path_of(owner)}; choose another name for {path_of(component)}"
            )
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
    return tuple(sorted(_OWNERS[kind] if kind in _OWNERS else _owners(kind)))


def get(kind: str, name: str) -> type:
    """Return the class that owns `name`.

    Raises:
        ValueError: there is no such kind or name; the message lists the choices and the nearest one.

    >>> get("feedforward", "mlp").__name__
    'MLP'
    """
    owner = _OWNERS.get(kind, {}).get(name)
    if owner is None:
        raise ValueError(no_such(kind, name, _owners(kind)) + of_another_kind(kind, name))
    return owner


def of_another_kind(kind: str, name: object) -> str:
    """Return the end of an error text: the other kind that has the name, or nothing.

    >>> of_another_kind("feedforward", "rms_norm")
    "; 'rms_norm' is of the kind norm"
    """
    others = [other for other, owners in _OWNERS.items() if name in owners and other != kind]
    return f"; {name!r} is of the kind {others[0]}" if others else ""


def title(component: object) -> str:
    """Return the name of a built component for error texts: kind and name, else its class.

    >>> title(object())
    'object'
    """
    for kind, owners in _OWNERS.items():
        for name, owner in owners.items():
            if type(component) is owner:
                return f"{kind} {name!r}"
    return type(component).__name__


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


def check_base(kind: str, choice: Choice | str, base: type) -> None:
    """Raise TypeError unless the chosen class is a subclass of `base`, whose methods the builder calls.

    Used for residual styles and positions.
    """
    name = as_choice(choice).name
    if not issubclass(get(kind, name), base):
        raise TypeError(
            f"{kind} {name!r} ({path_of(get(kind, name))}) must be a subclass of components.{base.__name__}"
        )


def _owners(kind: str) -> dict[str, type]:
    if kind not in _OWNERS:
        raise ValueError(no_such("kind", kind, KINDS))
    return _OWNERS[kind]


def path_of(component: type) -> str:
    """Return the import path of a class, for error texts."""
    return f"{component.__module__}.{component.__qualname__}"


def _is_defined_again(owner: type, component: type) -> bool:
    # A notebook cell that runs twice, or a module that is reloaded, defines its class twice; the later one replaces the
    # first. A function may define several classes with the same path.
    in_a_function = component.__module__ != "__main__" and "<locals>" in component.__qualname__
    return path_of(owner) == path_of(component) and not in_a_function
