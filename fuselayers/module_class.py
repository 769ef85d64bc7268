"""Subclasses that replace the class of a module. `fuse`, `swap` and `parallelize` make theirs here.

Assigning to a module's `__class__` gives it another forward, or other attributes, and leaves the object as it is: its
parameters, hooks, and keys of the state_dict. It is still an instance of the class before.
"""

import copyreg
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn

Mark = Literal["fused_from", "swapped_from", "divided_from"]
"""The attribute of a subclass that holds the class before. It names who made the subclass."""


def subclass(
    cls: Any,
    members: Mapping[str, Any],
    *,
    mark: Mark,
    make: Callable[..., type],
    arguments: tuple[Any, ...],
    mixins: tuple[type, ...] = (),
) -> Any:
    """Return a subclass of a module's class with these members, and with the same name.

    Wrap policies and `_no_split_modules` match names.

    Args:
        cls: the module's class.
        members: the attributes of the subclass that differ.
        mark: the attribute that holds `cls`.
        make: make(cls, *arguments) returns the subclass. Copies and pickles of its modules call it, since pickle would
            look for the subclass under the name of `cls`.
        arguments: see `make`.
        mixins: base classes after `cls`.
    """
    own = {
        **members,
        **{name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")},
        mark: cls,
        "_class_before": cls,
        "_made_by": (make, arguments),
        "__reduce_ex__": _reduce,
    }
    return types.new_class(cls.__name__, (cls, *mixins), {}, lambda names: names.update(own))


def class_before(cls: Any, mark: Mark) -> Any:
    """Return a class without the subclass that `mark` names; a class that has none is returned as it is.

    FSDP, parametrizations and other marks derive classes from the subclass. They are derived again from the class
    before, once for each of them.
    """
    if mark in vars(cls):
        return vars(cls)[mark]
    if not hasattr(cls, mark):
        return cls
    key = f"_without_{mark}"
    if key not in vars(cls):
        bases = tuple(class_before(base, mark) for base in cls.__bases__)
        members = {
            name: bases[0] if value is cls.__bases__[0] else value  # a mark of the class itself
            for name, value in vars(cls).items()
            if name not in ("__dict__", "__weakref__") and not name.startswith("_without_")
        }
        setattr(cls, key, types.new_class(cls.__name__, bases, {}, lambda names: names.update(members)))
    return vars(cls)[key]


def unchanged_class(value: Any) -> type:
    """Return the type of a value; of a module that `swap` or `parallelize` changed, its type before.

    A fused class, and a class that FSDP or a parametrization made, is another type.
    """
    cls = type(value)
    while (before := getattr(cls, "_class_before", None)) is not None and cls.__bases__ == (before,):
        cls = before
    return cls


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Reduce a module for a copy or a pickle, which makes the subclass again."""
    cls: Any = type(module)
    ours = [base for base in cls.__mro__ if "_made_by" in vars(base)]
    reduced: tuple[Any, ...] = super(ours[-1], module).__reduce_ex__(max(protocol, 2))
    if cls is not ours[0]:  # a class that FSDP, a parametrization or the user derived
        return reduced
    if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        return _blank, (cls.__bases__[0], *cls._made_by), *reduced[2:]
    return _remade, (*reduced[:2], *cls._made_by), *reduced[2:]  # the class before defines its own reduction


def _blank(cls: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> nn.Module:
    made = make(cls, *arguments)
    module: nn.Module = made.__new__(made)
    return module


def _remade(
    remake: Callable[..., nn.Module], of: tuple[Any, ...], make: Callable[..., Any], arguments: tuple[Any, ...]
) -> nn.Module:
    module = remake(*of)
    module.__class__ = make(type(module), *arguments)
    return module
