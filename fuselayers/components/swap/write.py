"""A forward that was read, as a function again, in which calls of fused functions take the place of some steps."""

import ast
import functools
import linecache
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

from .casts import as_half, as_weight
from .steps import Branch, Forward, Global, Literal, Local, OfSelf, Operation, Ref, Run, Step, Unreadable

_PREFIX = "_fuselayers_"


def write(forward: Forward, added: Mapping[str, Any], *, title: str) -> Callable[..., Any]:
    """Return the function that `forward` describes.

    Args:
        forward: what it computes. Its first statement may be one made by `guard`.
        added: values by name that its steps use beside the globals of the function that was read.
        title: what tracebacks call its source.
    """
    function = forward.function
    # A global may have the name of the function.
    inner, outer = (ast.parse(f"def {name}(): pass").body[0] for name in (f"{_PREFIX}forward", "make"))
    assert isinstance(inner, ast.FunctionDef)
    assert isinstance(outer, ast.FunctionDef)
    named = {"slice": slice, "as_half": as_half, "as_weight": as_weight}  # an argument may be called slice
    added = {**added, **{f"{_PREFIX}{name}": value for name, value in named.items()}}
    inner.args, inner.body = forward.arguments, _block(forward.body)
    outer.args.args = [ast.arg(name) for name in added]
    outer.body = [inner, ast.Return(ast.Name(inner.name, ast.Load()))]
    text = ast.unparse(ast.fix_missing_locations(ast.Module([outer], [])))
    filename = f"<{title}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    made: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), function.__globals__, made)
    result: types.FunctionType = made["make"](**added)
    result.__defaults__ = function.__defaults__
    result.__kwdefaults__ = function.__kwdefaults__
    result.__name__, result.__qualname__ = function.__name__, function.__qualname__
    result.__doc__ = function.__doc__
    result.__annotations__ = function.__annotations__
    decorated: Callable[..., Any] = _decorated(forward.outer, function, result)
    return decorated


def _decorated(outer: Any, old: types.FunctionType, new: types.FunctionType) -> Any:
    """Return what decorators made of `old`, made of `new`: the same wrappers, around another function.

    Raises:
        Unreadable: a wrapper is not a plain function that holds the wrapped one in its closure.
    """
    if outer is old:
        return new
    inner = outer.__wrapped__
    if not isinstance(outer, types.FunctionType) or outer.__closure__ is None:
        raise Unreadable("a decorator of its forward is of an unknown kind")
    made = _decorated(inner, old, new)
    cells = [types.CellType(made) if _holds(cell, inner) else cell for cell in outer.__closure__]
    if all(cell is kept for cell, kept in zip(cells, outer.__closure__, strict=True)):
        raise Unreadable("a decorator of its forward is of an unknown kind")
    result = types.FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, tuple(cells))
    result.__kwdefaults__ = outer.__kwdefaults__
    return functools.update_wrapper(result, made)


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty one
        return False


def guard(condition: str, otherwise: str, forward: Forward) -> ast.stmt:
    """The statement `if not condition(self): return otherwise(self, the arguments)`."""
    arguments = forward.arguments
    names = [argument.arg for argument in arguments.args]
    call = ast.Call(ast.Name(otherwise, ast.Load()), [ast.Name(name, ast.Load()) for name in names], [])
    if arguments.vararg is not None:
        call.args.append(ast.Starred(ast.Name(arguments.vararg.arg, ast.Load()), ast.Load()))
    call.keywords = [ast.keyword(one.arg, ast.Name(one.arg, ast.Load())) for one in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        call.keywords.append(ast.keyword(None, ast.Name(arguments.kwarg.arg, ast.Load())))
    test = ast.parse(f"not {condition}({names[0]})", mode="eval").body
    return ast.If(test, [ast.Return(call)], [])


def _block(body: list[Any]) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    for one in body:
        if isinstance(one, Run):
            statements += _run(one)
        elif isinstance(one, Branch):
            statements.append(ast.If(one.test, _block(one.body), _block(one.orelse)))
        else:
            statements.append(one)
    return statements or [ast.Pass()]


def _run(run: Run) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    last_use = _last_uses(run)
    for number, operation in enumerate(run.steps):
        if operation.kind[0] != "item":  # the step that unpacks has assigned it
            statements.append(ast.Assign([_target(run, number)], _operation(operation)))
        # A tensor must not live longer than in the function that was read.
        over = [ast.Name(_name(old), ast.Del()) for old, last in last_use.items() if last == number]
        if over:
            statements.append(ast.Delete(list[ast.expr](over)))
    if run.returned is not None:
        return [*statements, ast.Return(_value(run.returned))]
    if run.bound:
        targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in run.bound]
        values = [_value(ref) for ref in run.bound.values()]
        statements.append(ast.Assign([ast.Tuple(targets, ast.Store())], ast.Tuple(values, ast.Load())))
        over = [ast.Name(_name(number), ast.Del()) for number in sorted(_numbers(*run.bound.values()))]
        statements += [ast.Delete(list[ast.expr](over))] if over else []
    return statements


def _target(run: Run, number: int) -> ast.expr:
    """What a step is assigned to: its name, or the names of its items, each a step of its own."""
    if run.steps[number].kind[0] != "unpack":
        return ast.Name(_name(number), ast.Store())
    items = {
        one.kind[1]: index
        for index, one in enumerate(run.steps)
        if one.kind[0] == "item" and one.operands == (Step(number),)
    }
    names = [
        _name(items[index]) if index in items else f"{_PREFIX}unused" for index in range(run.steps[number].kind[1])
    ]
    return ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())


def _last_uses(run: Run) -> dict[int, int]:
    """For each step that the run's results do not hold: the number of the step that uses it last, or its own."""
    last = {number: number for number, step in enumerate(run.steps) if step.kind[0] != "unpack"}
    last |= {
        ref.number: number
        for number, operation in enumerate(run.steps)
        for ref in operation.operands
        if isinstance(ref, Step) and run.steps[ref.number].kind[0] != "unpack"
    }
    for ref in (run.returned, *run.bound.values()):
        if isinstance(ref, Step):
            last.pop(ref.number, None)
    return last


def _numbers(*refs: Ref) -> set[int]:
    return {ref.number for ref in refs if isinstance(ref, Step)}


def _name(number: int) -> str:
    return f"{_PREFIX}{number}"


def _value(ref: Ref) -> ast.expr:
    match ref:
        case Step(number=number):
            return ast.Name(_name(number), ast.Load())
        case Local(name=name):
            return ast.Name(name, ast.Load())
        case OfSelf(path=path):
            return _of_self(path)
        case Global(text=text):
            return ast.parse(text, mode="eval").body
        case Literal(value=int() | float() as value) if math.copysign(1, value) < 0:
            # As Python writes it: a constant of -2 would become -2 ** x, which is -(2 ** x).
            return ast.UnaryOp(ast.USub(), ast.Constant(-value))
        case Literal(value=value):
            return ast.Constant(value)


def _of_self(path: str) -> ast.expr:
    value: ast.expr = ast.Name("self", ast.Load())
    for part in path.split(".") if path else ():
        if part.isidentifier():
            value = ast.Attribute(value, part, ast.Load())
        else:  # a module of a sequence
            modules = ast.Attribute(value, "_modules", ast.Load())
            value = ast.Subscript(modules, ast.Constant(part), ast.Load())
    return value


def _operation(operation: Operation) -> ast.expr:
    kind, operands = operation.kind, [_value(operand) for operand in operation.operands]
    match kind[0]:
        case "call":
            return _call(kind, operands)
        case "binary":
            return ast.BinOp(operands[0], getattr(ast, kind[1])(), operands[1])
        case "unary":
            return ast.UnaryOp(getattr(ast, kind[1])(), operands[0])
        case "compare":
            return ast.Compare(operands[0], [getattr(ast, kind[1])()], [operands[1]])
        case "read":
            return operands[0]
        case "attribute":
            return ast.Attribute(operands[0], kind[1], ast.Load())
        case "tuple":
            return ast.Tuple(operands, ast.Load())
        case "unpack":
            return operands[0]
        case "result":
            return ast.Subscript(operands[0], ast.Constant(kind[1]), ast.Load())
        case "subscript":
            return ast.Subscript(operands[0], operands[1], ast.Load())
        case "slice":
            parts = iter(operands)
            bounds = [next(parts) if given else ast.Constant(None) for given in kind[1]]
            return ast.Call(ast.Name(f"{_PREFIX}slice", ast.Load()), bounds, [])
        case "written":
            return _renamed(kind[1], dict(zip(kind[2], operands, strict=True)))
    raise AssertionError(kind)


def _call(kind: tuple[Any, ...], operands: list[ast.expr]) -> ast.expr:
    _, method, stars, by_name = kind
    function, *rest = operands
    if method is not None:
        function = ast.Attribute(function, method, ast.Load())
    arguments = [ast.Starred(value, ast.Load()) if star else value for value, star in zip(rest, stars, strict=False)]
    keywords = [
        ast.keyword(None if name == "**" else name, value)
        for name, value in zip(by_name, rest[len(stars) :], strict=True)
    ]
    return ast.Call(function, arguments, keywords)


def _renamed(text: str, values: Mapping[str, ast.expr]) -> ast.expr:
    class Rename(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return values.get(node.id, node)

    expression: ast.expr = Rename().visit(ast.parse(text, mode="eval").body)
    return expression
