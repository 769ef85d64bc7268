"""late_recompute -- order the backward so that recomputed values live as short as possible.

As extracted from the joint graph, a backward begins with every op that it recomputes, layer 1 first, and their results
stay alive until the gradients reach them. Here each is recomputed right before its first reader.
"""

import torch.fx as fx

from ..._torch.tracing import recompiled
from ..node_kinds import behind_gradients, draws, writes


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
