"""The steps of a forward, read from its source.

The source is parsed. Each run of plain statements becomes one list of steps (see `steps`). Everything else, loops for
instance, stays as it is.
"""

import ast
import builtins
import copy
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from .branches import take_branches
from .casts import cast_of
from .steps import Branch, Forward, Global, Literal, Local, OfSelf, Operation, Ref, Run, Step, Unreadable


def read(cls: type, fixed: Mapping[str, bool] = MappingProxyType({})) -> Forward:
    """Read the forward of a class.

    Args:
        cls: the class.
        fixed: tests of branches, and whether they hold.

    Raises:
        Unreadable: it has no source, or uses something that another function could not.
    """
    outer: Any = getattr(cls, "forward", None)
    function = inspect.unwrap(outer) if callable(outer) else outer
    definition = _definition(function)
    assert isinstance(function, types.FunctionType)
    arguments = copy.deepcopy(definition.args)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if one is None else ast.Constant(None) for one in arguments.kw_defaults]
    reader = _Reader(cls, function, definition, fixed)
    body = reader.block(definition.body)
    return Forward(function, outer, arguments, body, reader.inlined, reader.beside, reader.tests, reader.fixed)


def read_sequence(cls: Any, names: tuple[str, ...]) -> Forward:
    """Read the forward of an `nn.Sequential` whose modules have these names: it calls one after the other."""
    forward = nn.Sequential.forward
    assert cls.forward is forward
    steps = [
        Operation(("call", None, (False,), ()), (OfSelf(name), Step(number - 1) if number else Local("input")))
        for number, name in enumerate(names)
    ]
    arguments = ast.parse("def forward(self, input): pass").body[0].args  # type: ignore[attr-defined]
    return Forward(forward, forward, arguments, [Run(steps, {}, Step(len(steps) - 1))], {}, set(), set(), {})


def _definition(function: Any, *, first: tuple[str, ...] = ("self",)) -> ast.FunctionDef:
    """The source of a function with these first arguments."""
    if not isinstance(function, types.FunctionType):
        raise Unreadable("its forward is no plain function")
    if function.__closure__ or hasattr(function, "__wrapped__"):
        raise Unreadable("its forward uses a variable of a function around it")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise Unreadable("its forward has no source") from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise Unreadable("its forward is no plain function")
    if definition.args.posonlyargs or tuple(one.arg for one in definition.args.args[: len(first)]) != first:
        raise Unreadable("its forward has no self, or arguments by position alone")
    nodes = list(ast.walk(definition))
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    used_up = {id(one) for call in calls if call.func.id in _USE_UP for one in call.args}  # type: ignore[attr-defined]
    if any(isinstance(node, ast.Name) and node.id in _LOOKING for node in nodes):
        raise Unreadable("its forward looks at its own variables")
    if any(isinstance(node, ast.Name) and node.id == "self" and isinstance(node.ctx, ast.Store) for node in nodes):
        raise Unreadable("its forward assigns self")
    for node in nodes:
        # What reads a variable later would not find its value; a mangled name would be another one.
        if node is not definition and isinstance(node, _LATE) and id(node) not in used_up:
            raise Unreadable(f"its forward has a {type(node).__name__}")
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name.startswith("__") and not name.endswith("__"):
            raise Unreadable("its forward uses a private name")
    return definition


def parse_run(text: str, names: Mapping[str, Any]) -> Run:
    """Read a pattern: plain statements whose globals are `names` and `self`; every other name is a `Local`."""
    tree = ast.parse(textwrap.dedent(text))
    reader = _Reader(None, types.FunctionType((lambda: None).__code__, dict(names)), None)
    run = reader.run(tree.body, read_later=None)
    assert run is not None, text
    return run


class _Reader:
    """Reads the statements of one function."""

    def __init__(
        self,
        cls: type | None,
        function: types.FunctionType,
        definition: ast.FunctionDef | None,
        fixed: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        self.cls = cls
        self.globals = function.__globals__
        self.definition = definition
        self.given = fixed
        self.tests, self.fixed = (set(), {}) if definition is None else take_branches(definition, fixed)
        self.self_name: str | None = "self"
        self.locals = set() if definition is None else set(function.__code__.co_varnames)
        self.steps: list[Operation] = []
        self.names: dict[str, Ref] = {}
        self.inlined: dict[str, types.FunctionType] = {}
        self.beside: set[types.FunctionType] = set()
        self.depth = 0

    def block(self, statements: list[ast.stmt]) -> "list[Run | ast.stmt | Branch]":
        body: list[Run | ast.stmt | Branch] = []
        waiting: list[ast.stmt] = []

        def flush() -> None:
            if waiting:
                run = self.run(waiting, read_later=self._read_outside(waiting))
                body.extend(waiting if run is None else [run])
                waiting.clear()

        for statement in _until_return(statements):
            if _says_nothing(statement):
                continue
            if self._is_plain(statement):
                waiting.append(statement)
                continue
            flush()
            if isinstance(statement, ast.If):
                body.append(Branch(statement.test, self.block(statement.body), self.block(statement.orelse)))
            else:
                body.append(statement)
        flush()
        return body

    def run(self, statements: list[ast.stmt], *, read_later: set[str] | None) -> Run | None:
        """The run of these statements; None if something in them is not looked into."""
        self.steps, self.names = [], {}
        returned = None
        try:
            for statement in statements:
                returned = self._statement(statement)
        except Unreadable:
            return None
        bound = {name: ref for name, ref in self.names.items() if read_later is None or name in read_later}
        return Run(self.steps, bound, returned)

    def _is_plain(self, statement: ast.stmt) -> bool:
        """Whether a statement can be part of a run; tried alone, so that one that cannot does not spoil others."""
        kept = self.steps, self.names
        self.steps, self.names = [], {}
        try:
            self._statement(statement)
        except Unreadable:
            return False
        finally:
            self.steps, self.names = kept
        return True

    def _read_outside(self, statements: list[ast.stmt]) -> set[str]:
        assert self.definition is not None
        inside = {id(node) for statement in statements for node in ast.walk(statement)}
        outside = [node for node in ast.walk(self.definition) if id(node) not in inside]
        read = {node.id for node in outside if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)}
        # x += 1 reads x too.
        return read | {
            node.target.id for node in outside if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
        }

    def _statement(self, statement: ast.stmt) -> Ref | None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.names[name] = self._read_now(self._value(value))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.names[name] = self._read_now(self._value(value))
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value) if all(
                isinstance(target, ast.Name) for target in targets
            ):
                parts = self._step(("unpack", len(targets)), self._value(value))
                items = [self._step(("item", index), parts) for index in range(len(targets))]
                self.names.update({target.id: item for target, item in zip(targets, items, strict=True)})  # type: ignore[attr-defined]
            case ast.Return(value=ast.expr() as value):
                return self._value(value)
            case ast.If() if (cast := cast_of(statement)) is not None:
                name, function, path = cast
                operands = Global(function, f"_fuselayers_{function.__name__}"), self._name(name), OfSelf(path)
                self.names[name] = self._step(("call", None, (False, False), ()), *operands)
            case _:
                raise Unreadable(type(statement).__name__)
        return None

    def _step(self, kind: tuple[Any, ...], *operands: Ref) -> Step:
        self.steps.append(Operation(kind, operands))
        return Step(len(self.steps) - 1)

    def _value(self, node: ast.expr) -> Ref:
        match node:
            case ast.Constant(value=value):
                return Literal(type(value), value)
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=value, attr=attr):
                return self._attribute(value, attr)
            case ast.Call():
                return self._call(node)
            case ast.BinOp(left=left, op=op, right=right):
                return self._step(("binary", type(op).__name__), *self._values(left, right))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return Literal(type(value), -value)
            case ast.UnaryOp(op=op, operand=operand):
                return self._step(("unary", type(op).__name__), self._value(operand))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._step(("compare", type(op).__name__), *self._values(left, right))
            case ast.Tuple(elts=parts):
                return self._step(("tuple",), *self._values(*parts))
            case ast.Subscript(value=value, slice=index):
                return self._step(("subscript",), *self._values(value, index))
            case ast.Slice(lower=lower, upper=upper, step=step):
                given = tuple(part is not None for part in (lower, upper, step))
                return self._step(("slice", given), *(self._value(part) for part in (lower, upper, step) if part))
            case ast.IfExp() | ast.BoolOp() | ast.Compare():
                return self._as_written(node)
        raise Unreadable(type(node).__name__)

    def _values(self, *nodes: ast.expr) -> list[Ref]:
        """The values of several expressions. What is read before a call of a later one is read there."""
        refs: list[Ref] = []
        for index, node in enumerate(nodes):
            ref = self._value(node)
            later = any(isinstance(one, ast.Call) for after in nodes[index + 1 :] for one in ast.walk(after))
            refs.append(self._read_now(ref) if later else ref)
        return refs

    def _read_now(self, ref: Ref) -> Ref:
        """The value of an attribute or a global at this point: another call may change what it stands for."""
        is_data = (
            isinstance(ref, Global) and not isinstance(ref.value, (types.ModuleType, type)) and not callable(ref.value)
        )
        return self._step(("read",), ref) if is_data or (isinstance(ref, OfSelf) and ref.path) else ref

    def _as_written(self, node: ast.expr) -> Ref:
        """An expression that need not be evaluated whole: kept, with the names of the values in it."""
        if any(isinstance(one, _SCOPES) for one in ast.walk(node)):
            raise Unreadable(type(node).__name__)
        names = sorted({one.id for one in ast.walk(node) if isinstance(one, ast.Name)} & set(self.names))
        return self._step(("written", ast.unparse(node), tuple(names)), *(self.names[name] for name in names))

    def _name(self, name: str) -> Ref:
        if name in self.names:
            return self.names[name]
        if name == self.self_name:
            return OfSelf("")
        if name in self.locals:
            return Local(name)
        if name in self.globals:
            return Global(self.globals[name], name)
        if hasattr(builtins, name):
            return Global(getattr(builtins, name), name)
        if self.cls is None:
            return Local(name)
        raise Unreadable(name)

    def _attribute(self, value: ast.expr, attr: str) -> Ref:
        base = self._value(value)
        if isinstance(base, OfSelf):
            return OfSelf(f"{base.path}.{attr}" if base.path else attr)
        if isinstance(base, Global) and isinstance(base.value, types.ModuleType) and hasattr(base.value, attr):
            return Global(getattr(base.value, attr), f"{base.text}.{attr}")
        return self._step(("attribute", attr), base)

    def _call(self, node: ast.Call) -> Ref:
        function = node.func
        method = None
        if isinstance(function, ast.Attribute):
            base = self._attribute(function.value, function.attr)
            if isinstance(base, Step):  # a method of a value: its attribute is no step of its own
                called = self.steps.pop()
                method, target = function.attr, called.operands[0]
            else:
                target = base
        else:
            target = self._value(function)
        if isinstance(target, Global) and any(target.value is one for one in (super, locals, eval, exec)):
            raise Unreadable(target.text)
        stars = tuple(isinstance(argument, ast.Starred) for argument in node.args)
        names = [keyword.arg or "**" for keyword in node.keywords]
        if len(set(names)) < len(names):
            raise Unreadable("two **")
        parts = [argument.value if isinstance(argument, ast.Starred) else argument for argument in node.args]
        values = self._values(*parts, *(keyword.value for keyword in node.keywords))
        arguments, by_name = values[: len(parts)], dict(zip(names, values[len(parts) :], strict=True))
        inlined = None if any(stars) else self._inlined(target, arguments, by_name)
        if inlined is not None:
            return inlined
        kind = ("call", method, stars, tuple(by_name))
        return self._step(kind, target, *arguments, *by_name.values())

    def _inlined(self, target: Ref, arguments: list[Ref], by_name: dict[str, Ref]) -> Ref | None:
        """The value of a call whose steps can stand in its place; None if it is another call."""
        if isinstance(target, OfSelf):
            return self._inline(target, arguments, by_name)
        if isinstance(target, Global) and isinstance(target.value, types.FunctionType) and self._is_beside(target):
            return self._inline(target, arguments, by_name)
        if isinstance(target, Global) and _is_chunking(target.value) and len(arguments) > 3 and not by_name:
            method, size, _, *inputs = arguments
            if isinstance(method, OfSelf) and isinstance(size, OfSelf):
                value = self._inline(method, inputs, {})
                self.fixed |= {} if value is None else {f"self.{size.path} == 0": True}
                return value
        return None

    def _is_beside(self, function: Global) -> bool:
        """Whether a function is a global of the module that the forward is in, under its own name."""
        module = sys.modules.get(function.value.__module__)
        return module is not None and vars(module) is self.globals and function.text == function.value.__name__

    def _inline(self, target: OfSelf | Global, arguments: list[Ref], by_name: dict[str, Ref]) -> Ref | None:
        """The value of a method of the class itself, or of a function beside it, whose body is plain; None if it is
        another thing."""
        is_method = isinstance(target, OfSelf)
        if isinstance(target, Global):
            function = target.value
        else:
            function = self.cls.__dict__.get(target.path) if self.cls is not None else None
        if function is None or self.depth > 3 or getattr(function, "__globals__", None) is not self.globals:
            return None
        try:
            definition = _definition(function, first=("self",) if is_method else ())
        except Unreadable:
            return None
        taken = definition.args
        if taken.vararg or taken.kwarg or taken.kwonlyargs or (definition.decorator_list and not is_method):
            return None
        names = [argument.arg for argument in taken.args[is_method:]]
        given = {**dict(zip(names, arguments, strict=False)), **by_name}
        if len(given) != len(arguments) + len(by_name) or given.keys() != set(names):
            return None
        inner = _Reader(self.cls, function, definition, self.given if is_method else {})
        inner.depth = self.depth + 1
        inner.steps = list(self.steps)
        if is_method:
            inner.names = given
        else:  # what is an attribute here may be none there
            inner.self_name = None
            inner.names = {name: inner._read_now(ref) for name, ref in given.items()}
        returned = None
        try:
            for statement in _until_return(definition.body):
                if not _says_nothing(statement):
                    returned = inner._statement(statement)
        except Unreadable:
            return None
        if returned is not None:
            self.steps = inner.steps
            self.inlined |= {**inner.inlined, **({target.path: function} if isinstance(target, OfSelf) else {})}
            self.beside |= inner.beside | (set() if is_method else {function})
            self.tests |= inner.tests
            self.fixed |= inner.fixed
        return returned


def _says_nothing(statement: ast.stmt) -> bool:
    """Whether it is a docstring, or what stands for no statement."""
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _is_chunking(function: Any) -> bool:
    """Whether it is the function of transformers that calls a method with its inputs, whole where a size is 0."""
    place = getattr(function, "__module__", None), getattr(function, "__name__", None)
    return place == ("transformers.pytorch_utils", "apply_chunking_to_forward")


_SCOPES = (
    *(ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    *(ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom),
)


_LATE = (
    *(ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.GeneratorExp),
    *(ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal, ast.Match),
)


_LOOKING = frozenset({"locals", "vars", "dir", "eval", "exec"})
_USE_UP = frozenset({"all", "any", "list", "max", "min", "sum", "tuple"})
"""What goes through a generator at once."""


def _until_return(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements up to the first return: no other one of the same block runs."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.Return):
            return
