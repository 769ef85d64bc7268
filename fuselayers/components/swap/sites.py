"""A module whose class is a subclass with another forward, and the way back."""

import functools
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import nn

from . import loss
from .branches import decided, still
from .children import child_class, expanded, is_child, plain_child
from .fallbacks import forget, note, why_not
from .match import Match, matches, replaced
from .rules import Rule
from .shipped import RULES
from .source import read, read_sequence
from .steps import Branch, Forward, Global, OfSelf, Run, Unreadable
from .write import guard, write

__all__ = ["Found", "is_swapped", "layer_class", "subclass", "unswap_class"]

Found = tuple[str, tuple[tuple[str, str], ...]]
"""The name of a rule that was found, and its slots with the paths of their attributes."""

_Holds = Callable[[str, Mapping[str, Callable[[Any], bool]], str, str], bool]
"""Whether an attribute is what a slot of a rule asks for: name of the rule, its slots, slot, path."""

_PREFIX: Final = "_fuselayers_"


def layer_class(module: nn.Module, rules: Sequence[Rule]) -> type | None:
    """Return a subclass of the module's class whose forward has what the rules find replaced; None for nothing found.

    One class serves all modules of a class in which the same is found. Its attribute `found` is a tuple of `Found`.
    """
    kind: Any = type(module)
    if "forward" in module.__dict__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return None
    if kind.__reduce__ is not object.__reduce__ or _looks_at_subclasses(kind):
        return None
    make = functools.partial(
        _class_with,
        kind,
        tuple(rule for rule in rules if rule.applies is None or rule.applies(module)),
        lambda _, slots, slot, path: _passes(module, path, slots[slot]),
        functools.partial(child_class, module),
        sequence=tuple(module._modules) if _is_sequence(kind) else (),
    )
    found: Any = make()
    forward = _read(kind, kind.forward, ())
    fixed = () if forward is None else decided(module, forward.tests)
    more: Any = make(fixed) if fixed else None
    # Attributes are only fixed where that finds something more.
    if more is not None and (found is None or Counter(more.found) - Counter(found.found)):
        found = more
    return found if found is not None and found.may_run(module) else None


def is_swapped(module: nn.Module) -> bool:
    """Return whether a module has a class that `swap` made."""
    return hasattr(type(module), "swapped_from")


def unswap_class(module: nn.Module) -> bool:
    """Give a module its own class back; return whether it had another one."""
    if not is_swapped(module):
        return False
    kind: Any = type(module)
    module.__class__ = _original(kind)
    # Accelerate leaves a forward that it found in the class in the module itself.
    held = getattr(module.__dict__.get("forward"), "__func__", None)
    ours, own = list(_inside(kind.forward)), list(_inside(kind.swapped_from.forward))
    if held in ours and held not in own:
        module.__dict__["forward"] = types.MethodType(own[ours.index(held)], module)
    forget(module)
    return True


def _inside(forward: Any) -> Iterator[Any]:
    """A function, and what its decorators were put around, from the outside in."""
    while forward is not None:
        yield forward
        forward = getattr(forward, "__wrapped__", None)


@functools.cache
def _original(kind: Any) -> type:
    """The class before `swap`. FSDP and parametrizations derive classes, then that of `swap` is among their bases."""
    if "swapped_from" in vars(kind):
        own: type = kind.swapped_from
        return own
    bases = tuple(_original(base) if hasattr(base, "swapped_from") else base for base in kind.__bases__)
    members = {name: value for name, value in vars(kind).items() if name not in {"__dict__", "__weakref__"}}
    made: type = type(kind)(kind.__name__, bases, members)
    return made


def subclass(cls: type, members: dict[str, Any]) -> type:
    """Return a subclass of the same name: wrap policies and `_no_split_modules` go by names."""
    face = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "swapped_from": cls}
    return type(cls.__name__, (cls,), {**members, **face})


def _looks_at_subclasses(cls: type) -> bool:
    """Whether making a subclass may have an effect, such as an entry in a registry; that of transformers has none."""
    owners = [one for one in cls.__mro__[:-1] if "__init_subclass__" in vars(one)]
    return any(one.__module__.partition(".")[0] not in {"torch", "transformers", "typing"} for one in owners)


def _passes(module: nn.Module, path: str, test: Callable[[Any], bool]) -> bool:
    try:
        value = functools.reduce(getattr, path.split("."), module) if path else module
    except AttributeError:
        return False
    return bool(test(value))


def _class_with(
    cls: type,
    rules: tuple[Rule, ...],
    holds: _Holds,
    class_of: Callable[[str], type | None],
    fixed: tuple[tuple[str, bool], ...] = (),
    *,
    sequence: tuple[str, ...] = (),
) -> type | None:
    forward = read_sequence(cls, sequence) if sequence else _read(cls, cls.forward, fixed)  # type: ignore[attr-defined]
    if forward is None:
        return None
    # Two modules of a sequence stay two: each may have more found in it.
    rewriting = _Rewriting(rules, holds, (lambda _: None) if sequence else class_of)
    if sequence:
        rewriting.tests.append(("", _has_modules(sequence)))
    rewriting.tests += _tests_of(forward)
    forward = rewriting.whole(forward)
    if not rewriting.found:
        return None
    key = cls, forward.outer, tuple(rewriting.found), *rewriting.key()
    if key not in _classes:
        try:
            _classes[key] = _make_class(cls, forward, rewriting, sequence)
        except Unreadable:
            return None
    return _classes[key]


_classes: dict[Any, type] = {}


@functools.cache
def _read(cls: type, forward: Any, fixed: tuple[tuple[str, bool], ...]) -> Forward | None:
    """The forward of a class, read; one that is assigned to the class later is read again."""
    try:
        return read(cls, dict(fixed))
    except Unreadable:
        return None


class _Rewriting:
    """Replaces what rules find in one forward.

    Attributes:
        found: what was found.
        children: the paths and classes of the modules whose steps stand in place of calls.
        tests: the tests that must hold in each call, each with the path of its attribute.
        functions: what the new forward calls, by name.
    """

    def __init__(self, rules: tuple[Rule, ...], holds: _Holds, class_of: Callable[[str], type | None]) -> None:
        self.rules, self.holds, self.class_of = rules, holds, class_of
        self.children: dict[str, type] = {}
        self.found: list[Found] = []
        self.tests: list[tuple[str, Callable[[Any], bool]]] = []
        self.functions: dict[str, Any] = {}

    def key(self) -> tuple[Any, ...]:
        """What tells classes apart in which rules of the same names were found."""
        return tuple(self.functions.values()), tuple(self.tests)

    def whole(self, forward: Forward) -> Forward:
        forward = replace(forward, body=[self._part(one) for one in forward.body])
        fused = loss.with_fused_loss(forward, functools.partial(self.holds, loss.NAME, loss.SLOTS))
        if fused is None:
            return forward
        forward, head, functions = fused
        self.note(loss.NAME, loss.SLOTS, {"head": head})
        self.functions |= functions
        return forward

    def _part(self, one: Any) -> Any:
        if isinstance(one, Branch):
            return Branch(one.test, [*map(self._part, one.body)], [*map(self._part, one.orelse)])
        return self._run(one) if isinstance(one, Run) else one

    def _run(self, run: Run) -> Run:
        functions = dict(self.functions)
        kept = self._across(expanded(run, self.class_of))
        self.functions = functions
        if kept:
            run = expanded(run, self.class_of, only=kept)
            for path in sorted(kept):
                self._keep(path)
        for across in (True, False) if kept else (False,):
            for rule in self.rules:
                while (match := self._first(rule, run, across=across)) is not None:
                    run = self._replaced(rule, match, run)
                    self._note(rule, match)
        return run

    def _across(self, run: Run) -> set[str]:
        """The paths of the children in which matches stand that are in more than one module."""
        kept: set[str] = set()
        if any(step.origin for step in run.steps):
            for rule in self.rules:
                while (match := self._first(rule, run, across=True)) is not None:
                    kept |= {run.steps[number].origin for number in match.steps} - {""}
                    run = self._replaced(rule, match, run)
        return kept

    def _keep(self, path: str) -> None:
        cls = self.class_of(path)
        child = None if cls is None else plain_child(cls)
        assert cls is not None
        assert child is not None
        self.children[path] = cls
        self.functions |= child.globals
        self.tests.append((path, is_child(cls)))
        self.tests += [(f"{path}.{name}" if name else path, test) for name, test in _tests_of(child.forward)]

    def _replaced(self, rule: Rule, match: Match, run: Run) -> Run:
        slots = [name for name in rule.slots if name in match.bound]
        origin, *_ = sorted({run.steps[number].origin for number in match.steps})
        bound = {"training": OfSelf(f"{origin}.training" if origin else "training"), **match.bound}
        named = [*slots, *({"training"} - set(slots)) & inspect.signature(rule.replacement).parameters.keys()]
        function = f"{_PREFIX}rule_{len(self.functions)}"
        self.functions[function] = rule.replacement
        return replaced(run, replace(match, bound=bound), function, rule.inputs, tuple(named))

    def _first(self, rule: Rule, run: Run, *, across: bool) -> Match | None:
        tests = {slot: functools.partial(self._fits, rule, slot) for slot in rule.slots}
        found = (one for each in rule.runs for one in matches(each, run, results=rule.results, slots=tests))
        found = (one for one in found if not (_is_across(one, run) and _takes_training(rule)))
        return next((one for one in found if not across or _is_across(one, run)), None)

    def _fits(self, rule: Rule, slot: str, ref: OfSelf | Global) -> bool:
        if isinstance(ref, Global):  # a function, such as F.gelu; a call could not guard a module
            return not isinstance(ref.value, nn.Module) and callable(ref.value) and rule.slots[slot](ref.value)
        return self.holds(rule.name, rule.slots, slot, ref.path)

    def _note(self, rule: Rule, match: Match) -> None:
        paths = {name: ref.path for name in rule.slots if isinstance(ref := match.bound.get(name), OfSelf)}
        self.note(rule.name, rule.slots, paths)

    def note(self, name: str, slots: Mapping[str, Callable[[Any], bool]], paths: Mapping[str, str]) -> None:
        self.found.append((name, tuple(paths.items())))
        self.tests += [(path, slots[slot]) for slot, path in paths.items()]


def _takes_training(rule: Rule) -> bool:
    """Whether the replacement asks for the mode of the module, which modules that a match goes across may not share."""
    return "training" in inspect.signature(rule.replacement).parameters and "training" not in rule.slots


def _is_across(match: Match, run: Run) -> bool:
    return len({run.steps[number].origin for number in match.steps}) > 1


def _is_sequence(cls: Any) -> bool:
    return issubclass(cls, nn.Sequential) and cls.forward is nn.Sequential.forward


@functools.cache
def _has_modules(names: tuple[str, ...]) -> Callable[[Any], bool]:
    return lambda module: tuple(module._modules) == names


def _make_class(cls: type, forward: Forward, rewriting: _Rewriting, sequence: tuple[str, ...]) -> type:
    tests = tuple(dict.fromkeys(rewriting.tests))

    def may(module: nn.Module) -> bool:
        return all(_passes(module, path, test) for path, test in tests)

    def fuses(module: nn.Module) -> bool:
        if may(module):
            return True
        note(module, why_not(module, *next((path, test) for path, test in tests if not _passes(module, path, test))))
        return False

    added = {**rewriting.functions, f"{_PREFIX}may": fuses, f"{_PREFIX}original": forward.function}
    body = [guard(f"{_PREFIX}may", f"{_PREFIX}original", forward), *forward.body]
    function = write(replace(forward, body=body), added, title=f"swap of {cls.__module__}.{cls.__qualname__}")
    members = {
        "forward": function,
        "found": tuple(rewriting.found),
        "children_found": tuple(rewriting.children.items()),
        "sequence_found": sequence,
        "fixed_found": tuple(forward.fixed.items()),
        "may_run": staticmethod(may),
        "__reduce_ex__": _reduce,
    }
    return subclass(cls, members)


def _tests_of(forward: Forward) -> list[tuple[str, Callable[[Any], bool]]]:
    """The tests that tell whether a forward computes what was read, each with the path of its attribute."""
    methods = [(name, _is_method(function)) for name, function in forward.inlined.items()]
    functions = [("", _stays(function)) for function in sorted(forward.beside, key=lambda one: one.__name__)]
    return [*methods, *functions, *(("", still(*one)) for one in forward.fixed.items())]


@functools.cache
def _is_method(function: Any) -> Callable[[Any], bool]:
    return lambda value: getattr(value, "__func__", None) is function


@functools.cache
def _stays(function: types.FunctionType) -> Callable[[Any], bool]:
    module, name = sys.modules[function.__module__], function.__name__

    def test(_: Any) -> bool:
        return getattr(module, name, None) is function

    test.reason = f"{name} is another function"  # type: ignore[attr-defined]
    return test


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    kind: Any = type(module)
    state = kind.__getstate__(module) if hasattr(kind, "__getstate__") else module.__dict__
    return (
        _Loader(kind),
        (*(kind.swapped_from, kind.found, kind.children_found, kind.sequence_found, kind.fixed_found),),
        state,
    )


class _Loader:
    """Makes a copied or unpickled module, empty yet. A copy has the class; another process makes it again."""

    def __init__(self, kind: type | None = None) -> None:
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _Loader, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Loader":
        return self

    def __call__(
        self,
        cls: type,
        found: tuple[Found, ...],
        children: tuple[tuple[str, type], ...] = (),
        sequence: tuple[str, ...] = (),
        fixed: tuple[tuple[str, bool], ...] = (),
    ) -> nn.Module:
        kind = self.kind or _class_as_found(cls, found, dict(children), sequence, fixed)
        module: nn.Module = object.__new__(kind)
        return module


def _class_as_found(
    cls: type,
    found: tuple[Found, ...],
    children: Mapping[str, type],
    sequence: tuple[str, ...],
    fixed: tuple[tuple[str, bool], ...],
) -> type:
    """The class of shipped rules that were found; the original class where this process does not find them."""
    known = {(name, pair) for name, paths in found for pair in paths}
    rules = tuple(rule for rule in RULES if any(name == rule.name for name, _ in found))
    kind = _class_with(
        *(cls, rules, lambda name, _, slot, path: (name, (slot, path)) in known, children.get, fixed),
        sequence=sequence,
    )
    return cls if kind is None or kind.found != found else kind  # type: ignore[attr-defined]
