"""merge_equal_nodes -- common-subexpression elimination that leaves random and mutating ops alone."""

import operator
from collections.abc import Hashable
from typing import Any, Final

import torch
import torch.fx as fx

from ..._torch.dispatch import OpOverload, storage_key
from ..._torch.tracing import is_tagged_backward, recompiled
from ..node_kinds import writes

_FRESH_MEMORY: Final = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty)


def merge_equal_nodes_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Replace every call by an earlier equal one, so that an equal value is saved once.

    Not merged: random and mutating ops, by their tags rather than by a list of names (torch's own pass merges two draws
    of a custom random op into one); uninitialised memory; values that share storage with an output, since a caller may
    need two outputs to be two tensors; and a forward node with a backward one, since the backward of an
    `autograd.Function` may recompute a value on purpose.
    """
    graph = graph_module.graph
    if any(_writes_elsewhere(node) for node in graph.nodes):
        return graph_module
    returned = {_storage(node) for node in graph.output_node().all_input_nodes} - {None}
    first: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_pure(node) or _storage(node) in returned:
            continue
        equal = first.setdefault(_key(node), node)
        if equal is not node:
            node.replace_all_uses_with(equal)
            graph.erase_node(node)
    return recompiled(graph_module)


def _writes_elsewhere(node: fx.Node) -> bool:
    """True for a write that may change the result of a later, equal call.

    False for the copies by which AOTAutograd updates inputs: they come last, and readers of the input read a clone.
    """
    written = node.args[0] if node.args else None
    copies_back = node.target is torch.ops.aten.copy_.default and getattr(written, "op", None) == "placeholder"
    return writes(node) and not copies_back


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return all(source.op == "call_function" and _is_pure(source) for source in node.all_input_nodes)
    if not isinstance(target, OpOverload) or target.overloadpacket in _FRESH_MEMORY:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not node.is_impure()


def _key(node: fx.Node) -> Hashable:
    """A description of the call. As text, 0.0 and -0.0 differ, as do 1, 1.0 and True; a node is its name."""
    arguments = repr((node.args, node.kwargs))
    region = node.meta.get("recompute"), node.meta.get("ac_graph_id")
    return node.target, arguments, region, is_tagged_backward(node)


def _storage(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return storage_key(value)
    except NotImplementedError:
        return None
