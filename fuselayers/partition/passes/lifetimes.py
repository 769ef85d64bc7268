"""lifetimes -- order the ops of the two graphs so that values live as short as possible.

As extracted from the joint graph, a backward begins with every op that it recomputes, layer 1 first, and their results
stay alive until the gradients reach them. `late_recompute_pass` recomputes each right before its first reader.

If few values are saved, each layer's values still wait for the gradient of that layer, since the next layer's are
recomputed from them. With `nested_recompute_pass` only a few values wait, and the others are recomputed from these a
second time (nested checkpoints: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.3).
"""

import operator
from collections.abc import Collection
from typing import Final

import torch.fx as fx

from ..._torch.tracing import is_gradient_input, is_sym_node, recompiled, rename
from ..node_kinds import behind_gradients, draws, why_runs_once, writes

NESTED: Final = "_nested"
"""The end of the name of an op that runs a second time in backward."""


def late_recompute_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Move each node that depends on no gradient right before its first reader; gradients keep their order.

    Writes to inputs, random draws and other ops with effects keep their order. Nodes without readers are erased: fx
    keeps an op that could draw random numbers, such as an attention kernel, and would run it for nothing.
    """
    graph = graph_module.graph
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    gradients = behind_gradients(graph.nodes)
    if not gradients:
        return graph_module
    position = {node: number for number, node in enumerate(nodes)}
    output = graph.output_node()
    placed: set[fx.Node] = set()
    anchors = [node for node in nodes if node in gradients or _has_effect(node) or (draws(node) and node.users)]
    for anchor in (*anchors, output):
        stack = list(anchor.all_input_nodes)
        if writes(anchor):
            # Earlier nodes stay before a write: they may read the old value.
            stack += [node for node in nodes if position[node] < position[anchor]]
        wanted: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in position and node not in placed and node not in wanted and node not in gradients:
                wanted.add(node)
                stack += node.all_input_nodes
        for node in sorted(wanted, key=position.__getitem__):
            anchor.prepend(node)
        placed |= wanted
        placed.add(anchor)
    for node in reversed(nodes):
        if not node.users and not _has_effect(node):
            graph.erase_node(node)
    return recompiled(graph_module)


def _has_effect(node: fx.Node) -> bool:
    return writes(node) or node.is_impure(impure_random=False)


def nested_recompute_pass(graph_module: fx.GraphModule, kept: Collection[str]) -> fx.GraphModule:
    """Let the gradients read copies of the recomputed values; the copies are computed from the values named `kept`.

    `late_recompute_pass` then puts each copy right before its first reader. Sizes, and ops that may run only once, are
    kept too.
    """
    graph = graph_module.graph
    gradients: set[fx.Node] = set()
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if is_gradient_input(node) or node.op == "output" or not gradients.isdisjoint(node.all_input_nodes):
            gradients.add(node)
            for source in node.all_input_nodes:
                node.replace_input_with(source, copies.get(source, source))
        elif node.name not in kept and why_runs_once(node) is None and not is_sym_node(node):
            with graph.inserting_after(node):
                copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
            rename(copies[node], node.name + NESTED)
    return recompiled(graph_module)


def early_getitems_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Move each getitem right behind the op that returns its tuple, in their order: unused elements are freed there."""
    graph = graph_module.graph
    # From the last to the first: each is put right behind the op, so the first one ends up nearest.
    for node in reversed(list(graph.find_nodes(op="call_function", target=operator.getitem))):
        parent = node.args[0]
        if isinstance(parent, fx.Node) and parent.op != "placeholder" and len(node.all_input_nodes) == 1:
            parent.append(node)
    return recompiled(graph_module)
