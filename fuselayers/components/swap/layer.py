"""Replace a module's class by a subclass with a rule's forward, and restore it."""

import functools
import inspect
import types
from abc import ABCMeta
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor, nn

from ...module_class import class_before, subclass
from .fallbacks import forget, note
from .rule import Match, Rule


def layer_members(cls: Any, rule: Rule, match: Match) -> dict[str, Any]:
    """Return the members of a subclass of a module's class with the forward of a rule. See `swapped_class`."""
    own = cls.forward
    take = arguments_of(own)

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        obstacle = rule.obstacle(self, match)
        if any(isinstance(value, Tensor) and value.is_nested for value in (*args, *kwargs.values())):
            obstacle = "its input is a nested tensor"
        if obstacle is not None:
            note(self, obstacle)
            return own(self, *args, **kwargs)
        if match.inputs is None:
            return rule.forward(self, *args, **kwargs)
        arguments = take(args, kwargs)
        if arguments is None:  # usually the caller's mistake; then the original forward raises
            result = own(self, *args, **kwargs)
            note(self, "the rule cannot read its arguments")
            return result
        inputs = {role: arguments[name] for role, name in match.inputs}
        parts = {role: getattr(self, name) for role, name in match.parts}
        return rule.forward(self, **inputs, **parts, **rule.options)

    return {"forward": forward, "rule": rule.name}


def arguments_of(forward: Callable[..., Any]) -> Callable[[Any, Any], dict[str, Any] | None]:
    """Return a function that names the arguments of a call of this forward, with the defaults; `**kwargs` is one.

    It returns None if the forward does not accept the arguments. `bind` of `inspect.Signature` is not used, since
    Dynamo cannot trace it.
    """
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    others = [parameters.pop().name] if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    by_position = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    names = {parameter.name for parameter in parameters}
    defaults = {part.name: part.default for part in parameters if part.default is not part.empty}

    def take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        positional = dict(zip(by_position, args, strict=False))
        if len(args) > len(by_position) or any(name in positional for name in kwargs):
            return None
        rest = {name: value for name, value in kwargs.items() if name not in names}
        if rest and not others:
            return None
        arguments = {**defaults, **positional, **kwargs, **dict.fromkeys(others, rest)}
        return None if any(name not in arguments for name in names) else arguments

    return take


def own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the original forward of a swapped module."""
    # After `unswap`, a wrapper such as Accelerate's may still call the forward of the swapped class.
    kind: Any = getattr(type(module), "swapped_from", type(module))
    return kind.forward(module, *args, **kwargs)


def is_swapped(module: nn.Module) -> bool:
    """Return whether `swap` made the module's class."""
    return hasattr(type(module), "swapped_from")


def cannot_swap(module: nn.Module) -> str | None:
    """Return why a subclass cannot replace the module's class, or None if it can."""
    kind: Any = type(module)
    if "forward" in module.__dict__:
        return "its forward is replaced"
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return "its class defines how it is pickled"
    # Creating a subclass may have a side effect, such as an entry in a registry. `__init_subclass__` of
    # transformers has none.
    if type(kind) not in (type, ABCMeta):
        return f"its class has the metaclass {type(kind).__name__}"
    owners = [base for base in kind.__mro__[:-1] if "__init_subclass__" in vars(base)]
    if any(base.__module__.partition(".")[0] not in {"torch", "transformers", "typing"} for base in owners):
        return "its class has an __init_subclass__"
    return None


def unswap_class(module: nn.Module) -> bool:
    """Restore the original class of a module; return whether it was swapped."""
    if not is_swapped(module):
        return False
    kind: Any = type(module)
    module.__class__ = class_before(kind, "swapped_from")
    # Accelerate stores the class's forward in the module itself.
    held = getattr(module.__dict__.get("forward"), "__func__", None)
    ours, own = list(_inside(kind.forward)), list(_inside(kind.swapped_from.forward))
    if held in ours and held not in own:
        module.__dict__["forward"] = types.MethodType(own[max(ours.index(held) - 1, 0)], module)
    forget(module)
    return True


def _inside(forward: Any) -> Iterator[Any]:
    """Yield a function, then each function that it wraps, from the outside in."""
    while forward is not None:
        yield forward
        forward = getattr(forward, "__wrapped__", None)


def swapped_class(cls: Any, members_of: Callable[..., dict[str, Any]], *key: Hashable) -> type:
    """Return the subclass of a module's class with the members `members_of(cls, *key)`: its forward and its rule.

    One class serves all modules with the same class and key.
    """
    swapped: type = _swapped_class(cls, cls.forward, members_of, key)
    return swapped


@functools.cache
def _swapped_class(cls: Any, _own: Any, members_of: Callable[..., dict[str, Any]], key: tuple[Hashable, ...]) -> Any:
    """Return the subclass. The forward is part of the cache key, since a patch may replace it."""
    members = {
        **members_of(cls, *key),
        "__init__": _constructor(cls),
        "__prepare_scriptable__": _unswapped,
    }
    return subclass(cls, members, mark="swapped_from", make=swapped_class, arguments=(members_of, *key))


def _constructor(cls: Any) -> Callable[..., None]:
    """Return an `__init__` with which `type(model)(config)` makes a model of the original class.

    Not a `__new__`: torch and Accelerate copy modules with `cls.__new__(cls)`.
    """

    @functools.wraps(cls.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if "swapped_from" in vars(type(self)):  # no subclass by FSDP or the user
            self.__class__ = cls
        cls.__init__(self, *args, **kwargs)

    return __init__


def _unswapped(module: nn.Module) -> nn.Module:
    """Return a module with the original class and the same attributes. `torch.jit.script` compiles it instead."""
    twin: nn.Module = object.__new__(class_before(type(module), "swapped_from"))
    twin.__dict__.update(module.__dict__)
    return twin
