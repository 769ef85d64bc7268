"""What a forward computes, as a list of steps.

Each step has its own number: other names for the same value are gone, and so is the way in which the source nests its
calls.

    x = self.up(x)                         step 0   call  self.up, x
    x = F.relu(x)                 ->       step 1   call  F.relu, step 0
    return self.down(x)                    step 2   call  self.down, step 1;  return step 2
"""

import ast
import functools
import types
from dataclasses import dataclass, field
from typing import Any


class Unreadable(Exception):
    """This source has a form that is not looked into."""


@dataclass(frozen=True)
class Step:
    """A reference to the value of a step."""

    number: int


@dataclass(frozen=True)
class Local:
    """A local variable as it was before the run."""

    name: str


@dataclass(frozen=True)
class OfSelf:
    """An attribute of self, or of an attribute of it: `weight.dtype`."""

    path: str


@dataclass(frozen=True, eq=False)
class Global:
    """What a global name stands for; the text says how the source spells it."""

    value: Any
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Global) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class Literal:
    """A constant. 1, 1.0 and True are three of them."""

    kind: type
    value: Any


Ref = Step | Local | OfSelf | Global | Literal


# Note: [the kind of a step] A kind is all of a step but its values, so equal kinds with equal operands compute the
# same, and a pattern is compared with a forward kind by kind. x.chunk(2, dim=-1) is of the kind
# ("call", "chunk", (False,), ("dim",)): a method, one argument by position that has no star, one by name. Its operands
# are x, 2 and -1, in this order. Others:
#
#     f(x)        ("call", None, (False,), ())     f, x              x + 1    ("binary", "Add")      x, 1
#     a, b = x    ("unpack", 2)                    x                 x.T      ("attribute", "T")     x
#                 ("item", 0), ("item", 1)         the step above    self.p   ("read",)              self.p, read here
#
# "written" holds the source of an expression that may be evaluated in part, `a if b else c`; only `write` looks inside.
@dataclass(frozen=True)
class Operation:
    """One step: `kind` says what is done with the operands; see Note: [the kind of a step].

    `origin` is the path of the child module whose forward it is part of, and "" for the module's own.
    """

    kind: tuple[Any, ...]
    operands: tuple[Ref, ...]
    origin: str = field(default="", compare=False)


@dataclass
class Run:
    """Plain statements that follow each other.

    Attributes:
        steps: what they compute, in order.
        bound: the local variables that they assign and that are read later, with their values.
        returned: the value that the run returns; None where it does not end the function.
    """

    steps: list[Operation]
    bound: dict[str, Ref]
    returned: Ref | None = None

    @functools.cached_property
    def kinds(self) -> frozenset[tuple[Any, ...]]:
        """The kinds of its steps, without calls of methods: those of an attribute may be read in two ways."""
        return frozenset(step.kind for step in self.steps if step.kind[0] != "call" or step.kind[1] is None)


@dataclass
class Forward:
    """A forward, read.

    Attributes:
        function: the function whose source it is.
        outer: what the class has: the function, or what its decorators made of it.
        arguments: its arguments, without annotations and defaults.
        body: runs, and the statements that are kept as they are.
        inlined: methods of the class whose steps stand in place of calls, by name.
        beside: functions of the class's module whose steps stand in place of calls.
        tests: the tests of its branches.
        fixed: tests of attributes that must hold, or must not, else those steps are not what the forward computes.
    """

    function: types.FunctionType
    outer: types.FunctionType
    arguments: ast.arguments
    body: "list[Run | ast.stmt | Branch]"
    inlined: dict[str, types.FunctionType]
    beside: set[types.FunctionType]
    tests: set[str]
    fixed: dict[str, bool]


@dataclass
class Branch:
    """An if statement; its test is kept as it is."""

    test: ast.expr
    body: "list[Run | ast.stmt | Branch]"
    orelse: "list[Run | ast.stmt | Branch]"
