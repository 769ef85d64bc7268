"""The steps of child modules in place of calls of them, so that a rule can stand across modules.

h = self.norm(x)              step 0   call   F.layer_norm, x, self.norm.weight     of "norm"
y = self.mlp(h)       ->      step 1   call   self.mlp.up, step 0                   of "mlp"
                              step 2   call   F.relu, step 1                        of "mlp"
"""

import functools
import sys
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from .casts import as_half, as_weight
from .slots import is_activation, is_dropout, is_layer_norm, is_linear, is_plain, original_type
from .source import read
from .steps import Forward, Global, Literal, Local, OfSelf, Operation, Ref, Run, Step, Unreadable

__all__ = ["Child", "calls_only", "child_class", "expanded", "is_child", "plain_child"]

_MODULE: Final = "_fuselayers_of_"


@dataclass(frozen=True)
class Child:
    """A class whose forward is one run of plain statements.

    Attributes:
        cls: the class.
        forward: its forward.
        run: its steps.
        globals: the modules that its steps take their globals from, by the names that the steps have for them.
    """

    cls: type
    forward: Forward
    run: Run
    globals: Mapping[str, types.ModuleType]


_CALLS: Final = ("__call__", "__getattr__", "_call_impl", "_wrapped_call_impl")
"""What stands between a call of a module and its forward, or its attributes."""


@functools.cache
def plain_child(cls: Any) -> Child | None:
    """Return what stands in place of calls of modules of this class; None where nothing can."""
    if any(getattr(cls, name) is not getattr(nn.Module, name) for name in _CALLS):
        return None
    try:
        forward = read(cls)
    except Unreadable:
        return None
    if forward.outer is not forward.function or len(forward.body) != 1 or not isinstance(forward.body[0], Run):
        return None
    arguments, run = forward.arguments, forward.body[0]
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or not isinstance(run.returned, Step):
        return None
    names = {argument.arg for argument in arguments.args[1:]}
    found: dict[str, types.ModuleType] = {}
    steps: list[Operation] = []
    for step in run.steps:
        refs = [_of_module(ref, forward.function, found) for ref in step.operands]
        known = all(ref is not None and (not isinstance(ref, Local) or ref.name in names) for ref in refs)
        if step.kind[0] == "written" or not known:
            return None
        steps.append(replace(step, operands=tuple(ref for ref in refs if ref is not None)))
    return Child(cls, forward, replace(run, steps=steps), found)


def _of_module(ref: Ref, function: types.FunctionType, found: dict[str, types.ModuleType]) -> Ref | None:
    """A global as an attribute of the module that the function is in; None if that is not possible."""
    if not isinstance(ref, Global) or ref.value is as_half or ref.value is as_weight:
        return ref
    module = sys.modules.get(function.__module__)
    if module is None or module.__dict__ is not function.__globals__ or ref.text.partition(".")[0] not in vars(module):
        return None
    if not (callable(ref.value) or isinstance(ref.value, (types.ModuleType, torch.dtype))):
        return None  # data, which another call may change
    name = _MODULE + function.__module__.replace(".", "_")
    found[name] = module
    return Global(ref.value, f"{name}.{ref.text}")


# Note: [which children are looked into] Rules name some children as a whole: `up` is a linear layer, and its call is
# one step. Their own steps would hide them from the rules, so these are not looked into. Neither is a child with
# children that are looked into: a rule may stand across it and its own child, and finds more when `swap` comes to it
# alone. So in
#
#     Block: norm (LayerNorm), mlp (up, act, down)           Encoder: layers (Block, Block), norm
#
# Block sees the steps of mlp, and can fuse its norm with them. Encoder sees calls of Blocks.
def child_class(module: nn.Module, path: str) -> type | None:
    """Return the class of a child whose steps can stand in place of a call; None for another attribute.

    See Note: [which children are looked into].
    """
    try:
        child = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        return None
    if not isinstance(child, nn.Module) or any(
        test(child) for test in (is_linear, is_activation, is_dropout, is_layer_norm)
    ):
        return None
    if any(child_class(child, name) is not None for name, _ in child.named_children()):
        return None  # a rule may stand across that and its own steps
    cls: Any = original_type(child)
    return cls if plain_child(cls) is not None and is_child(cls)(child) else None


@functools.cache
def is_child(cls: Any) -> Callable[[Any], bool]:
    """Return the test whether a child is still of this class, and a call of it does no more than its forward."""
    forward = cls.forward

    def test(value: Any) -> bool:
        return cls.forward is forward and original_type(value) is cls and is_plain(value)

    return test


@functools.cache
def calls_only(cls: Any, function: Any) -> bool:
    """Return whether the forward of a class of modules calls this function with its argument, and no more."""
    child = plain_child(cls) if issubclass(cls, nn.Module) else None
    if child is None or len(child.run.steps) != 1:
        return False
    (step,) = child.run.steps
    called, *given = step.operands
    plain = step.kind == ("call", None, (False,), ()) and isinstance(called, Global) and called.value is function
    return plain and isinstance(given[0], Local)


def expanded(run: Run, class_of: Callable[[str], type | None], *, only: Collection[str] | None = None) -> Run:
    """Return the run with the steps of children in place of calls of them.

    Args:
        run: it stays as it is.
        class_of: the class of the child at a path, or None.
        only: the paths of the children; None for all.
    """
    steps: list[Operation] = []
    new: dict[int, Ref] = {}

    def moved(ref: Ref) -> Ref:
        return new[ref.number] if isinstance(ref, Step) else ref

    for number, operation in enumerate(run.steps):
        step = replace(operation, operands=tuple(map(moved, operation.operands)))
        path = _called(step)
        cls = None if path is None or (only is not None and path not in only) else class_of(path)
        child = None if cls is None else plain_child(cls)
        given = None if child is None else _arguments(step, child.forward)
        # See Note: [a value is read where it was read] in match.py.
        late = given is not None and any(isinstance(ref, OfSelf) for ref in given.values())
        if child is None or given is None or late:
            steps.append(step)
            new[number] = Step(len(steps) - 1)
            continue
        assert path is not None
        first = len(steps)

        def inside(ref: Ref, path: str = path, given: Mapping[str, Ref] = given, first: int = first) -> Ref:
            match ref:
                case Step():
                    return Step(first + ref.number)
                case Local():
                    return given[ref.name]
                case OfSelf():
                    return OfSelf(f"{path}.{ref.path}" if ref.path else path)
            return ref

        steps += [Operation(one.kind, tuple(map(inside, one.operands)), path) for one in child.run.steps]
        assert child.run.returned is not None
        new[number] = inside(child.run.returned)
    return Run(
        steps,
        {name: moved(ref) for name, ref in run.bound.items()},
        None if run.returned is None else moved(run.returned),
    )


def _called(step: Operation) -> str | None:
    """The path of the attribute that a step calls as it is."""
    called = step.operands[0] if step.kind[0] == "call" and step.kind[1] is None and not any(step.kind[2]) else None
    return called.path if isinstance(called, OfSelf) and called.path else None


def _arguments(step: Operation, forward: Forward) -> dict[str, Ref] | None:
    """The value of each argument of a call; None if that is not plain to see."""
    names = [argument.arg for argument in forward.arguments.args[1:]]
    by_position = step.operands[1 : 1 + len(step.kind[2])]
    by_name = dict(zip(step.kind[3], step.operands[1 + len(by_position) :], strict=True))
    given = {**dict(zip(names, by_position, strict=False)), **by_name}
    if len(by_position) > len(names) or len(given) < len(by_position) + len(by_name):
        return None
    defaults = forward.function.__defaults__ or ()
    for name, value in zip(names[len(names) - len(defaults) :], defaults, strict=True):
        if name not in given and (value is None or isinstance(value, (bool, int, float, str))):
            given[name] = Literal(type(value), value)
    return given if given.keys() == set(names) else None
