"""recompute_again -- backward recomputes a few values first, and the others from these when they are read.

If few values are saved, backward recomputes all layers before the first gradient, and each layer's values wait for the
gradient of that layer. With this pass only the few recomputed first wait, and each layer's values are recomputed a
second time (nested checkpoints: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.3).
"""

from collections.abc import Collection

import torch.fx as fx

from ..._torch.tracing import is_gradient_input, is_sym_node, recompiled, rename
from ..node_kinds import why_runs_once

AGAIN = "_again"
"""The end of the name of an op that runs a second time in backward."""


def recompute_again_pass(graph_module: fx.GraphModule, kept: Collection[str]) -> fx.GraphModule:
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
            rename(copies[node], node.name + AGAIN)
    return recompiled(graph_module)
