"""Normal forms: equal for two forwards that return the same expression after local variables are substituted.

    def forward(self, hidden_states):                         def forward(self, x):
        gate = self.gate_proj(hidden_states)                      return self.down(self.act(self.gate(x)) * self.up(x))
        up = self.up_proj(hidden_states)            ->
        return self.down_proj(self.act_fn(gate) * up)         self._0(self._1(self._2(x0)) * self._3(x0))

Local variables are substituted, parameters and attributes are numbered, functions get their full names, and annotations
and docstrings are dropped. A rule compares the normal form of a module's forward with that of its own source. Only
assignments, a return, and an `if` around one assignment are read: a forward that loops, branches in another way or
writes in place has no normal form.
"""

import ast
import builtins
import copy
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final


class Unreadable(ValueError):
    """A forward that has no normal form; the text says why."""


@dataclass(frozen=True)
class Form:
    """A forward in its normal form.

    Attributes:
        text: the normal form of what it returns.
        result: the same as a syntax tree, with the original names of attributes and parameters.
        attributes: the names of the attributes that the text numbers, in the order of their numbers.
        inputs: the names of the parameters that the text numbers, likewise.
        methods: the names of the module's methods that are inlined in the text.
    """

    text: str
    result: ast.expr
    attributes: tuple[str, ...]
    inputs: tuple[str, ...]
    methods: tuple[str, ...] = ()


_WRAPPERS: Final = frozenset(
    {"can_return_tuple.<locals>.wrapper", "deprecate_kwarg.<locals>.wrapper.<locals>.wrapped_func"}
)
"""Decorators of transformers that change neither the result nor, for positional arguments, the parameters."""


def form_of(cls: Any) -> Form:
    """Return the normal form of the forward of a class of modules.

    Raises:
        Unreadable: its source cannot be read, or it has no normal form.
    """
    tree, names = _source(cls.forward)
    return _form(tree, names, cls)


def _source(forward: Any) -> tuple[ast.FunctionDef, dict[str, Any]]:
    """Return the syntax tree of a function, and its globals."""
    while hasattr(forward, "__wrapped__"):
        name = getattr(getattr(forward, "__code__", None), "co_qualname", type(forward).__name__)
        if name not in _WRAPPERS:
            raise Unreadable(f"its forward is decorated by {name.partition('.')[0]}")
        forward = forward.__wrapped__
    try:
        source = textwrap.dedent(inspect.getsource(forward))
        tree = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        raise Unreadable("the source of its forward cannot be read") from None
    if not isinstance(tree, ast.FunctionDef) or getattr(forward, "__closure__", None):
        raise Unreadable("its forward is not a plain function")
    return tree, forward.__globals__


def form_of_source(source: str, names: dict[str, Any]) -> Form:
    """Return the normal form of a forward given as source; `names` are its globals."""
    tree = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return _form(tree, names, None)


def form_of_sequence(names: tuple[str, ...]) -> Form:
    """Return the normal form of the forward of an `nn.Sequential` of these modules."""
    result: ast.expr = ast.Name("$input", ast.Load())
    for name in names:
        child = ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())
        result = ast.Call(child, [result], [])
    return _numbered(result, ())


def _form(tree: ast.FunctionDef, names: dict[str, Any], cls: Any) -> Form:
    arguments = tree.args
    if arguments.vararg is not None:
        raise Unreadable("its forward takes *args")
    first, *others = [*arguments.posonlyargs, *arguments.args]
    others += arguments.kwonlyargs + ([arguments.kwarg] if arguments.kwarg else [])
    values: dict[str, ast.expr] = {first.arg: ast.Name("self", ast.Load())}
    values |= {argument.arg: ast.Name(f"${argument.arg}", ast.Load()) for argument in others}
    reader = _Reader(values, names, cls)
    return _numbered(_result(tree.body, reader), tuple(reader.methods))


def _result(body: list[ast.stmt], reader: "_Reader") -> ast.expr:
    for statement in body:
        match statement:
            case ast.Expr(value=ast.Constant()):  # the docstring
                pass
            case ast.Return(value=ast.expr() as value):
                result = reader.read(value)
                if reader.unread:
                    raise Unreadable(f"its forward computes {next(iter(reader.unread))} and does not use it")
                return result
            case ast.Assign(targets=[target], value=value):
                reader.assign(target, reader.read(value))
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value):
                reader.assign(target, reader.read(value))
            case ast.If(test=test, body=[ast.Assign(targets=[ast.Name() as target], value=value)], orelse=[]):
                before = reader.read(ast.Name(target.id, ast.Load()))
                reader.assign(target, ast.IfExp(reader.read(test), reader.read(value), before))
            case _:
                raise Unreadable(f"its forward has an unsupported statement ({type(statement).__name__})")
    raise Unreadable("its forward returns nothing")


class _Reader(ast.NodeTransformer):
    """Replaces local variables and method calls by their values, and globals by their full names."""

    def __init__(
        self,
        values: dict[str, ast.expr],
        names: dict[str, Any],
        cls: Any,
        methods: list[str] | None = None,
        outer: tuple[str, ...] = (),
    ) -> None:
        self.values, self.names, self.cls = values, names, cls
        self.methods = [] if methods is None else methods  # all that are inlined, also in one another
        self.outer = outer  # those that are being read
        self.unread: dict[str, ast.expr] = {}  # assigned calls: one that is not read may have a side effect

    def read(self, expression: ast.expr) -> ast.expr:
        read: ast.expr = self.visit(copy.deepcopy(expression))
        return read

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        names = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
        if self.unread.keys() & names:
            raise Unreadable(f"its forward computes {names[0]} and does not use it")
        if any(isinstance(node, ast.Call) for node in ast.walk(value)):
            self.unread |= dict.fromkeys(names, value)
        match target:
            case ast.Name():
                self.values[target.id] = value
            case ast.Tuple(elts=parts) if all(isinstance(part, ast.Name) for part in parts):
                for number, part in enumerate(parts):
                    assert isinstance(part, ast.Name)
                    self.values[part.id] = ast.Subscript(value, ast.Constant(number), ast.Load())
            case _:
                raise Unreadable("its forward assigns to something other than a variable")

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.unread.get(node.id)
        if value is not None:  # reading one part of a tuple is enough
            self.unread = {name: other for name, other in self.unread.items() if other is not value}
        return self.values[node.id] if node.id in self.values else self._global([node.id])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        names = ast.unparse(node).split(".")
        if names[0] not in self.values and all(map(str.isidentifier, names)):
            return self._global(names)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        read = self.generic_visit(node)
        assert isinstance(read, ast.Call)
        match read:
            case ast.Call(func=ast.Attribute(attr=name)) if name.endswith("_") and not name.endswith("__"):
                raise Unreadable(f"its forward calls {name}, which writes into a tensor")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=arguments, keywords=[]):
                method = inspect.getattr_static(self.cls, name, None)
                if inspect.isfunction(method):
                    return self._result_of(name, method, arguments)
        return read

    def _result_of(self, name: str, method: Any, arguments: list[ast.expr]) -> ast.expr:
        """Return the result of a method of the module for these arguments."""
        tree, names = _source(method)
        own = [argument.arg for argument in tree.args.args]
        if len(own) != len(arguments) + 1 or name in self.outer:
            raise Unreadable(f"its forward calls {name} recursively, or with arguments that cannot be read")
        values = dict(zip(own, [ast.Name("self", ast.Load()), *arguments], strict=True))
        self.methods.append(name)
        return _result(tree.body, _Reader(values, names, self.cls, self.methods, (*self.outer, name)))

    def _global(self, names: list[str]) -> ast.expr:
        first, *rest = names
        path = ".".join(names)
        try:
            value = self.names[first] if first in self.names else getattr(builtins, first)
            for name in rest:
                value = getattr(value, name)
        except AttributeError:
            raise Unreadable(f"its forward reads {path}, which is neither a variable nor a global") from None
        full = getattr(value, "__qualname__", None)
        # The wrapper of a function may have the function's name.
        if full is None or hasattr(value, "__wrapped__"):
            return ast.Name(repr(value), ast.Load())
        if not hasattr(value, "__module__"):  # such as a method of Tensor
            raise Unreadable(f"its forward names {path}, whose module is unknown")
        return ast.Name(f"{value.__module__}.{full}", ast.Load())


def _numbered(result: ast.expr, methods: tuple[str, ...]) -> Form:
    numbered = copy.deepcopy(result)
    attributes: dict[str, str] = {}
    inputs: dict[str, str] = {}
    # One node may occur several times.
    for node in {id(node): node for node in _names(numbered)}.values():
        if isinstance(node, ast.Attribute):
            node.attr = attributes.setdefault(node.attr, f"_{len(attributes)}")
        else:
            node.id = inputs.setdefault(node.id, f"x{len(inputs)}")
    own = tuple(name.removeprefix("$") for name in inputs)
    return Form(ast.unparse(numbered), result, tuple(attributes), own, methods)


def _names(node: ast.AST) -> Iterator[ast.Attribute | ast.Name]:
    """Yield each `self.name` and each parameter in an expression, in the order of the text."""
    match node:
        case ast.Attribute(value=ast.Name(id="self")):
            yield node
        case ast.Name(id=name) if name.startswith("$"):
            yield node
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _names(child)
