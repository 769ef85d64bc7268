"""Branches on plain attributes of a module, as the branch that is taken; each call tests that it still is.

The module's `norm_first` is True:

    if self.norm_first:
        x = self.norm(x)             ->      x = self.norm(x)
    y = f(x) if self.norm_first else x       y = f(x)
"""

import ast
import dis
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import nn

__all__ = ["decided", "still", "take_branches"]

_OF_TESTS: Final = (ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.Compare, ast.cmpop, ast.Constant)


def decided(module: nn.Module, tests: Iterable[str]) -> tuple[tuple[str, bool], ...]:
    """Return those tests that plain attributes of the module decide, and whether they hold.

    Attributes that a method of their class assigns do not count, nor do properties of modules: they may change between
    the guard of a call and the branch.
    """
    found = ((test, _holds(module, test)) for test in sorted(tests))
    return tuple((test, holds) for test, holds in found if holds is not None)


def _holds(module: nn.Module, test: str) -> bool | None:
    paths = _paths(test)
    if paths is None or not all(_stays(module, path.split(".")) for path in paths):
        return None
    try:
        values = [functools.reduce(getattr, path.split("."), module) for path in paths]
        plain = all(isinstance(value, (bool, int, float, str, types.NoneType)) for value in values)
        return bool(_function(test)(module)) if plain else None
    except (AttributeError, TypeError):  # None > 1
        return None


def _stays(owner: Any, names: Sequence[str]) -> bool:
    """Whether no class on a path assigns the attribute that it owns. Nobody assigns to a config of transformers."""
    if not names or {"PreTrainedConfig", "PretrainedConfig"} & {one.__name__ for one in type(owner).__mro__}:
        return True
    if not hasattr(owner, "__dict__"):
        return False
    name, *rest = names
    kind: Any = type(owner)
    held = name in vars(owner) or name in vars(owner).get("_modules", ())
    assigned = _assigned(kind)
    return held and assigned is not None and name not in assigned and _stays(getattr(owner, name), rest)


@functools.cache
def _paths(test: str) -> tuple[str, ...] | None:
    """The paths of the attributes of self in a test; None if it reads anything else."""

    def parts(node: ast.AST) -> Iterator[str | None]:
        if isinstance(node, ast.Attribute) and re.fullmatch(r"self(\.\w+)+", ast.unparse(node)):
            yield ast.unparse(node).removeprefix("self.")
        elif not isinstance(node, _OF_TESTS):
            yield None
        else:
            for one in ast.iter_child_nodes(node):
                yield from parts(one)

    found = list(parts(ast.parse(test, mode="eval").body))
    paths = tuple(one for one in found if one is not None)
    return paths if len(paths) == len(found) else None


@functools.cache
def _assigned(cls: type) -> frozenset[str] | None:
    """The attributes, of any object, that methods of a class assign outside of `__init__`; None for any."""
    methods = [value for one in cls.__mro__ if one not in (nn.Module, object) for value in vars(one).values()]
    steps = [
        step
        for method in map(inspect.unwrap, methods)
        if isinstance(method, types.FunctionType) and method.__name__ != "__init__"
        for step in dis.get_instructions(method)
    ]
    if any(step.argval in ("setattr", "delattr", "__setattr__", "__dict__") for step in steps):
        return None
    return frozenset({"training", *(step.argval for step in steps if step.opname in ("STORE_ATTR", "DELETE_ATTR"))})


@functools.cache
def _function(test: str) -> Callable[[nn.Module], Any]:
    function: Callable[[nn.Module], Any] = eval(f"lambda self: {test}", {})
    return function


@functools.cache
def still(test: str, holds: bool) -> Callable[[Any], bool]:
    """Return the function that says whether a test still holds, or still does not."""
    function = _function(test)

    def same(module: Any) -> bool:
        try:
            return bool(function(module)) is holds
        except TypeError:  # None > 1
            return False

    same.reason = f"{test} is {not holds} now"  # type: ignore[attr-defined]
    return same


def take_branches(definition: ast.FunctionDef, fixed: Mapping[str, bool]) -> tuple[set[str], dict[str, bool]]:
    """Put what is taken in place of each branch that `fixed` decides.

    Args:
        definition: a function, which is changed.
        fixed: tests, and whether they hold.

    Returns:
        The tests of all branches, and those of `fixed` that are among them.
    """
    taking = _Taking(fixed)
    taking.visit(definition)
    return taking.tests, {test: holds for test, holds in fixed.items() if test in taking.tests}


class _Taking(ast.NodeTransformer):
    def __init__(self, fixed: Mapping[str, bool]) -> None:
        self.fixed = fixed
        self.tests: set[str] = set()

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if (holds := self._holds(node.test)) is None:
            return self.generic_visit(node)
        taken = ast.Module(node.body if holds else node.orelse, [])
        self.generic_visit(taken)
        return taken.body or [ast.Pass()]

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        holds = self._holds(node.test)
        return self.generic_visit(node) if holds is None else self.visit(node.body if holds else node.orelse)

    def _holds(self, test: ast.expr) -> bool | None:
        text = ast.unparse(test)
        self.tests.add(text)
        return self.fixed.get(text)
