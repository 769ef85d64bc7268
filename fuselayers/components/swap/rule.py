"""The rules of `swap`: each matches a kind of module and replaces its forward."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from ..._torch.modules import is_plain
from ...module_class import unchanged_class
from .forms import Form, Unreadable, form_of, form_of_sequence, form_of_source
from .parts import why_not

Test = Callable[[Any], bool]
"""A test of an attribute."""

_NAMES: Final = {"math": math, "torch": torch, "F": F, "nn": nn}
"""The globals of forwards that a rule gives as source."""


@dataclass(frozen=True)
class Match:
    """How a rule fits the modules of a class.

    Attributes:
        inputs: pairs of the rule's name of an input and the forward's parameter; None if the rule's forward takes the
            same arguments as the module's.
        parts: pairs of the rule's name of a part and the module's attribute.
        names: the names of the modules of an `nn.Sequential`.
        methods: the module's methods whose results the rule's forward computes too.
    """

    inputs: tuple[tuple[str, str], ...] | None = None
    parts: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A kind of module, tests that it must pass, and its new forward.

    Attributes:
        name: its name in the report.
        of: a class, which matches modules of exactly this class (`nn.Module` matches any); or the source of forwards,
            which matches modules whose forward has the same normal form (see `forms`). The attributes in the source are
            the rule's parts.
        forward: called with the module, and with inputs and parts by their names in the source. If `of` is a class, it
            takes the same arguments as the module's own forward.
        parts: a test for each part, which gets None for a part that is not there. The tests run when the model is
            swapped and again in each call. If one returns False in a call, the module's own forward runs.
        options: arguments of `forward` that do not depend on the module.
        fits: a test of the module, run when the model is swapped; None accepts any module.

    >>> def doubled(self, *, x):
    ...     return 2 * x
    >>> rule = Rule("doubled", of=("def forward(self, x): return x + x",), forward=doubled)
    """

    name: str
    of: type | tuple[str, ...]
    forward: Callable[..., Any]
    parts: Mapping[str, Test] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    fits: Callable[[nn.Module], bool] | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def _forms(self) -> tuple[Form, ...]:
        """The normal forms of the forwards in `of`."""
        written = () if isinstance(self.of, type) else self.of
        return tuple(form_of_source(source, _NAMES) for source in written)

    def match(self, module: nn.Module) -> Match | str | None:
        """Return how the rule fits a module, why not if only its parts do not fit, or None if it does not match."""
        matches = self._matches(module)
        if not matches or (self.fits is not None and not self.fits(module)):
            return None
        obstacles = {match: self.obstacle(module, match) for match in matches}
        free = [match for match, obstacle in obstacles.items() if obstacle is None]
        if free:
            return free[0]
        # A plain torch layer of another kind means another computation, and so does a sequence of which no part fits.
        # Then the rule does not match, and there is no reason to give.
        near = (
            match
            for match in matches
            if not any(self._is_another(module, *part) for part in match.parts)
            and (not match.names or any(self._part_fits(module, *part) for part in match.parts))
        )
        return next((obstacles[match] for match in near), None)

    def _matches(self, module: nn.Module) -> list[Match]:
        """Return each way that a forward of the rule matches the module's. Two ways may differ only in the parts."""
        if isinstance(self.of, type):
            is_of_class = self.of in (unchanged_class(module), nn.Module)
            return [Match(parts=tuple((name, name) for name in self.parts))] if is_of_class else []
        names = tuple(module._modules) if type(module).forward is nn.Sequential.forward else ()
        form = form_of_sequence(names) if names else _form_of(type(module), type(module).forward)  # type: ignore[arg-type]
        if isinstance(form, str):
            return []
        return [
            Match(
                tuple(zip(written.inputs, form.inputs, strict=True)),
                tuple(zip(written.attributes, form.attributes, strict=True)),
                names,
                form.methods,
            )
            for written in self._forms
            if written.text == form.text
        ]

    def _part_fits(self, module: nn.Module, role: str, name: str) -> bool:
        test = self.parts.get(role)
        return test is None or test(getattr(module, name, None))

    def _is_another(self, module: nn.Module, role: str, name: str) -> bool:
        value = getattr(module, name, None)
        of_torch = isinstance(value, nn.Module) and type(value).__module__.startswith("torch.nn.modules")
        return of_torch and is_plain(value) and not self._part_fits(module, role, name)

    def obstacle(self, module: nn.Module, match: Match) -> str | None:
        """Return why a call of the module may not use the rule's forward, or None if it may."""
        if match.names and tuple(module._modules) != match.names:
            return "its modules have changed"
        if "parametrizations" in module._modules:  # reading a parameter computes it: spectral_norm's takes a step
            return "it is parametrized"
        if any(name in module.__dict__ for name in match.methods):
            return "one of its methods is replaced"
        for role, name in match.parts:
            if not self._part_fits(module, role, name):
                return why_not(module, name)
        return None


@cache
def _form_of(cls: Any, forward: Any) -> Form | str:
    """Return the normal form of a class, or why it has none. The forward is a key, since a patch may replace it."""
    try:
        return form_of(cls)
    except Unreadable as problem:  # cached as well: for a deep model each rule asks for the form of each module
        return str(problem)


def unread(module: nn.Module) -> str:
    """Return why no rule fits a module."""
    if not is_plain(module):
        return "it has a hook, or its forward is replaced"
    form = _form_of(type(module), type(module).forward)  # type: ignore[arg-type]
    return form if isinstance(form, str) else "no rule matches its forward"
