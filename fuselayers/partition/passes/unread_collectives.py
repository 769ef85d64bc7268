"""unread_collectives -- remove from backward the collectives that forward has run and nothing reads.

torch treats a collective as an op with an effect. So the backward that torch extracts keeps each collective whose input
it computes, read or not. The sizes of a process's shard decide which values backward computes. If the shards differ,
only some processes would communicate again, and all would wait forever.
"""

import torch.fx as fx

from ..._torch.tracing import recompiled
from ..node_kinds import is_collective


def unread_collectives_pass(backward: fx.GraphModule, forward: fx.GraphModule) -> fx.GraphModule:
    """Remove from backward each collective that forward has run and whose result is not read, and the ops that only it
    reads."""
    graph = backward.graph
    has_run = {node.name for node in forward.graph.nodes if is_collective(node)}
    if not has_run:
        return backward
    for node in reversed(graph.nodes):  # a reader comes before its sources
        sent_before = node.name in has_run and is_collective(node)
        if not node.users and (sent_before or not node.is_impure()):
            graph.erase_node(node)
    return recompiled(backward)
