"""The rules of `swap`: a kind of module, and the forward that it gets."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from .forms import Form, Unreadable, form_of, form_of_sequence, form_of_source
from .parts import is_plain, original_type, why_not

Test = Callable[[Any], bool]
"""A test of an attribute."""

_NAMES: Final = {"math": math, "torch": torch, "F": F, "nn": nn}
"""The globals of a written forward."""


@dataclass(frozen=True)
class Place:
    """How a rule fits the modules of a class.

    Attributes:
        inputs: the rule's name of each input, and the name of that parameter of the module's forward; None where the
            rule's forward is called as the module's.
        parts: the rule's name of each part, and the module's name of that attribute.
        names: of an `nn.Sequential` the names of its modules.
        methods: methods of the module that the rule's forward computes too.
    """

    inputs: tuple[tuple[str, str], ...] | None = None
    parts: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A kind of module, a test when the rule fits it, and the forward that it gets.

    Attributes:
        name: what the report calls it.
        of: a class, for modules of exactly this class (`nn.Module` for any); or forwards, as source, for modules whose
            own forward has the normal form of one of them (see `forms`). The attributes that it names are its parts.
        forward: called with the module, and with inputs and parts by the names that the written forward has for them.
            With a class as `of` it is called as the module's own forward.
        parts: a test of each part. Called when the model is swapped, and again in each call of the forward: where one
            is False, the module's own forward runs.
        fits: a test of the module, called when the model is swapped; None for any.

    >>> def doubled(self, *, x):
    ...     return 2 * x
    >>> rule = Rule("doubled", of=("def forward(self, x): return x + x",), forward=doubled)
    """

    name: str
    of: type | tuple[str, ...]
    forward: Callable[..., Any]
    parts: Mapping[str, Test] = field(default_factory=dict)
    fits: Callable[[nn.Module], bool] | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def _forms(self) -> tuple[Form, ...]:
        """The written forwards, read."""
        written = () if isinstance(self.of, type) else self.of
        return tuple(form_of_source(source, _NAMES) for source in written)

    def place(self, module: nn.Module) -> Place | str | None:
        """Return how the rule fits a module; why it does not, if its forward is the rule's; or None."""
        places = self._places(module)
        if not places or (self.fits is not None and not self.fits(module)):
            return None
        obstacles = {place: self.obstacle(module, place) for place in places}
        free = [place for place, obstacle in obstacles.items() if obstacle is None]
        if free:
            return free[0]
        # Another plain layer of torch there is another computation, and no obstacle.
        near = (place for place in places if not any(self._is_another(module, *part) for part in place.parts))
        return next((obstacles[place] for place in near), None)

    def _places(self, module: nn.Module) -> list[Place]:
        """The ways that the rule's forwards are the module's. Two of them may differ in the parts alone."""
        if isinstance(self.of, type):
            is_of_class = self.of in (original_type(module), nn.Module)
            return [Place(parts=tuple((name, name) for name in self.parts))] if is_of_class else []
        names = tuple(module._modules) if type(module).forward is nn.Sequential.forward else ()
        try:
            form = form_of_sequence(names) if names else _form_of(type(module), type(module).forward)  # type: ignore[arg-type]
        except Unreadable:
            return []
        return [
            Place(
                tuple(zip(written.inputs, form.inputs, strict=True)),
                tuple(zip(written.attributes, form.attributes, strict=True)),
                names,
                form.methods,
            )
            for written in self._forms
            if written.text == form.text
        ]

    def _is_another(self, module: nn.Module, role: str, name: str) -> bool:
        value = getattr(module, name, None)
        test = self.parts.get(role)
        of_torch = isinstance(value, nn.Module) and type(value).__module__.startswith("torch.nn.modules")
        return test is not None and of_torch and is_plain(value) and not test(value)

    def obstacle(self, module: nn.Module, place: Place) -> str | None:
        """Return why a call of the module may not take the rule's forward; None where it may."""
        if place.names and tuple(module._modules) != place.names:
            return "its modules have changed"
        if any(name in module.__dict__ for name in place.methods):
            return "one of its methods is replaced"
        for role, name in place.parts:
            test = self.parts.get(role)
            if test is not None and not _holds(module, name, test):
                return why_not(module, name)
        return None


@cache
def _form_of(cls: Any, forward: Any) -> Form:
    """The form of a class as long as it has this forward: a patch may give it another one."""
    return form_of(cls)


def _holds(module: nn.Module, name: str, test: Test) -> bool:
    try:
        return test(getattr(module, name))
    except AttributeError:
        return False


def unread(module: nn.Module) -> str:
    """Return why no rule fits a module."""
    if not is_plain(module):
        return "it has a hook or a forward of its own"
    try:
        _form_of(type(module), type(module).forward)  # type: ignore[arg-type]
    except Unreadable as problem:
        return str(problem)
    return "its forward is none of those that the rules name"
