"""early_getitems -- unpack tuples as soon as they are computed, so that unused elements are freed."""

import operator

import torch.fx as fx

from ..._torch.tracing import recompiled


def early_getitems_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Move each getitem right behind the op that returns its tuple, in their order."""
    graph = graph_module.graph
    # From the last to the first: each is put right behind the op, so the first one ends up nearest.
    for node in reversed(list(graph.find_nodes(op="call_function", target=operator.getitem))):
        parent = node.args[0]
        if isinstance(parent, fx.Node) and parent.op != "placeholder" and len(node.all_input_nodes) == 1:
            parent.append(node)
    return recompiled(graph_module)
