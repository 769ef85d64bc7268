"""The kinds of ops in a graph: which cost nothing to recompute, which may run only once, which values can be saved."""

import functools
import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
import torch.fx as fx

from .._torch.dispatch import OpOverload, schema_of
from .._torch.tracing import (
    CheckpointPolicy,
    is_gradient_input,
    is_opaque,
    is_sym_node,
    known_ops,
    overload_packet,
    placement,
    size_of,
)

# Inductor's ops for dropout and rand: pure functions of a saved seed, so recomputing them gives the same mask. They are
# matched by name, since they exist only once Inductor is imported.
_SEEDED_RANDOM: Final = frozenset({"prims::inductor_lookup_seed", "prims::inductor_random", "prims::inductor_randint"})
_MOVERS: Final = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("cat", "constant_pad_nd", "embedding", "flip", "index_select", "repeat"),
        *("roll", "select_scatter", "slice_scatter", "stack", "tril"),
    )
)
_COLLECTIVES: Final = ("_c10d_functional", "_dtensor")
_SHAPE_FROM_DATA: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


def num_bytes(node: fx.Node) -> int:
    """Bytes of all tensors of a node's value. Symbolic sizes count with their hint."""
    return size_of(node) if isinstance(node.meta.get("val"), torch.Tensor | list | tuple) else 0


def num_elements(node: fx.Node) -> int:
    """Elements of all tensors of a node's value. If their dtypes differ, their bytes are divided by the widest."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return num_bytes(node) // max(
        (value.dtype.itemsize for value in values if isinstance(value, torch.Tensor)), default=1
    )


def why_not_saveable(node: fx.Node) -> str | None:
    """Return None if the value can be saved (a tensor, an integer size, an opaque object), else why not."""
    value = node.meta.get("val")
    if is_sym_node(node):
        return "it is a symbolic float" if isinstance(value, torch.SymFloat) else None
    if isinstance(value, torch.Tensor) or is_opaque(node):
        return None
    return f"it is a {type(value).__name__}, neither a tensor nor a size"


def is_view(node: fx.Node) -> bool:
    """True if the op returns a view of its input, which costs nothing."""
    return isinstance(node.target, OpOverload) and _is_view_op(node.target)


def looks_at_its_input(node: fx.Node) -> bool:
    """True for a view, and for an element of the tuples of views that unbind, split and chunk return."""
    if node.target is operator.getitem and node.all_input_nodes:
        return is_view(node.all_input_nodes[0])
    return is_view(node) and bool(node.all_input_nodes)


def storage_of(node: fx.Node) -> fx.Node:
    """The node that owns this one's memory: itself, unless it is a view of a value that can be saved."""
    source = node
    while looks_at_its_input(source):
        source = source.all_input_nodes[0]
    return source if why_not_saveable(source) is None else node


def readers_of(node: fx.Node) -> list[fx.Node]:
    """The ops that read a value or a view of it, except the output of the graph."""
    readers: list[fx.Node] = []
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if looks_at_its_input(user):
                stack.append(user)
            elif user.op != "output":
                readers.append(user)
    return readers


def prefers_save(node: fx.Node) -> bool:
    """True if the user's checkpoint policy prefers to save the value."""
    return node.meta.get("recompute") is CheckpointPolicy.PREFER_SAVE


@functools.cache
def _is_view_op(target: OpOverload) -> bool:
    if target.overloadpacket in known_ops().view_ops:
        return True
    returns = schema_of(target).returns
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def is_fusible(node: fx.Node) -> bool:
    """True if a compiler fuses the op into the kernels around it: elementwise ops, reductions, indexing."""
    return node.op == "call_function" and (overload_packet(node) in known_ops().fusible_ops or _is_seeded_random(node))


def _is_seeded_random(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).name in _SEEDED_RANDOM


def writes(node: fx.Node) -> bool:
    """True if the op writes to one of its arguments."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def is_collective(node: fx.Node) -> bool:
    """True for a collective that writes to no argument, and for the op that waits for a collective's result."""
    return isinstance(node.target, OpOverload) and node.target.namespace in _COLLECTIVES and not writes(node)


def is_own_kernel(node: fx.Node) -> bool:
    """True for a kernel of this library's ops, which reads its inputs and writes its results once.

    Ops that run products of matrices inside are not included.
    """
    target = node.target
    return (
        isinstance(target, OpOverload)
        and target.namespace == "fuselayers"
        and not schema_of(target).name.startswith("fuselayers::linear_")
    )


def only_moves(node: fx.Node) -> bool:
    """True if the op copies values and computes nothing: its price is its memory traffic."""
    return node.op == "call_function" and overload_packet(node) in _MOVERS


def why_runs_once(node: fx.Node) -> str | None:
    """Return None if the op may run a second time in backward, else why it may not."""
    if node.op == "placeholder":
        return "it is an input"
    if node.op != "call_function":
        return "it is an attribute of the graph"
    if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return "it is tagged to be saved"
    target = node.target
    if target is operator.getitem or is_sym_node(node):
        return None
    if not isinstance(target, OpOverload):
        return "it is a higher-order op, whose effects are not known"
    if target is torch.ops.aten.index.Tensor and not _has_mask_index(node):
        return None  # torch tags it as if every index were a mask
    if _is_compared(node):
        return "it is compared for equality, and a compiler may round it otherwise in backward"
    return _why_op_runs_once(target) or ("it draws random numbers" if draws(node) else None)


def _is_compared(node: fx.Node) -> bool:
    """True for a value such as the x of x.amax(): its gradient goes to the elements that equal the result.

    See https://github.com/pytorch/pytorch/issues/186799.
    """
    value = node.meta.get("val")
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and any(user.target is torch.ops.aten.eq.Tensor for user in node.users)


def _has_mask_index(node: fx.Node) -> bool:
    values = (index.meta.get("val") for index in node.all_input_nodes[1:])
    return any(not isinstance(value, torch.Tensor) or value.dtype in (torch.bool, torch.uint8) for value in values)


@functools.cache
def _why_op_runs_once(target: OpOverload) -> str | None:
    if schema_of(target).is_mutable:
        return "it changes its input"
    if target.namespace in _COLLECTIVES:
        return "it communicates with other processes"
    if _SHAPE_FROM_DATA & set(target.tags):
        return "its shape depends on the data"
    if target is torch.ops.aten.as_strided.default:
        return "it reads memory by strides, and a compiler may give its input other strides in backward"
    return None


def draws(node: fx.Node) -> bool:
    """True if the op draws from a random generator, so that it matters when and how often it runs."""
    target = node.target
    if not isinstance(target, OpOverload) or _is_seeded_random(node):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Attention kernels carry the tag for their dropout; without one they draw nothing.
    takes_dropout = any(argument.name == "dropout_p" for argument in schema_of(target).arguments)
    return not takes_dropout or arguments_of(node).get("dropout_p", 0.0) != 0.0


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an op's call by name, without those that have their default."""
    assert isinstance(node.target, OpOverload)
    names = (argument.name for argument in schema_of(node.target).arguments)
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def behind_gradients(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on an incoming gradient, or that must be in backward; `nodes` in their order."""
    behind: set[fx.Node] = set()
    for node in nodes:
        starts = is_gradient_input(node) or placement(node) == "must_be_in_backward"
        if starts or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    return behind


# Frames that are not the user's: torch's, and the call in `capture`.
_NOT_THE_USERS: Final = (
    *(path + os.sep for path in torch.__path__),
    str(Path(__file__).parent / "inspect" / "capture.py"),
)
# File, line, and code if it is known: it is indented further than the next frame.
_FRAME: Final = re.compile(r'File "(.+)", line (\d+).*(?:\n {4,}(.+))?')


def source_line(node: fx.Node) -> str:
    """Return where in the user's code the node comes from, as `file:line: code`, or "" when that is not known.

    It is the innermost line that is neither torch's nor `capture`'s.
    """
    for file, line, code in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        if not file.startswith(_NOT_THE_USERS):
            return f"{file}:{line}" + (f": {code}" if code else "")
    return ""


def module_of(node: fx.Node) -> str:
    """Return the path of the module whose forward or backward made the node, such as "blocks.0.norm", or ""."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", list(stack.values())[-1][0])
    return re.sub(r"^L\['\w+'\]\.?", "", path)
