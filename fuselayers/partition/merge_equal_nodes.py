"""merge_equal_nodes -- common-subexpression elimination that knows what must not be merged."""

from typing import Any, Final

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

__all__ = ["merge_equal_nodes"]

_FRESH_MEMORY: Final = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty)


def merge_equal_nodes(module: fx.GraphModule) -> fx.GraphModule:
    """Replace every call by an earlier equal one, so that an equal value is saved once.

    Not merged are random and mutating ops, by their tags rather than by a list of names (torch's own pass merges two
    draws of a custom random op into one), uninitialised memory, and values that share storage with an output, since a
    caller may rely on two outputs being two tensors.
    """
    graph = module.graph
    output = next(iter(reversed(graph.nodes)))
    returned = {_storage(node) for node in output.all_input_nodes} - {None}
    mutates = any(_is_mutating(node) for node in graph.nodes)
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if mutates or node.op != "call_function" or not _is_pure(node) or _storage(node) in returned:
            continue
        key = _key(node)
        if key is None:
            continue
        twin = first.setdefault(key, node)
        if twin is not node:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)
    graph.lint()
    module.recompile()
    return module


def _is_mutating(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket in _FRESH_MEMORY:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not node.is_impure()


def _key(node: fx.Node) -> Any:
    """A hashable description of the call, or None where an argument cannot be hashed; 1, 1.0 and True stay apart."""
    leaves, structure = pytree.tree_flatten((node.args, dict(node.kwargs)))
    key = (
        node.target,
        tuple((type(leaf), leaf) for leaf in leaves),
        structure,
        node.meta.get("recompute"),
        node.meta.get("ac_graph_id"),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _storage(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:
        return None
