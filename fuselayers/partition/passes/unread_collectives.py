"""unread_collectives -- backward does not communicate again what forward has sent and nothing reads.

To torch a collective has an effect, so the backward that torch extracts keeps each one whose input it computes, read or
not. The values that backward computes depend on the sizes of a process's part. If the parts differ, only some processes
would send again, and all would wait forever.
"""

import torch.fx as fx

from ..node_kinds import is_collective


def unread_collectives_pass(backward: fx.GraphModule, forward: fx.GraphModule) -> fx.GraphModule:
    """Remove from backward each collective that forward has run and whose result is not read, and what is only
    computed for it."""
    graph = backward.graph
    has_run = {node.name for node in forward.graph.nodes if is_collective(node)}
    if not has_run:
        return backward
    for node in reversed(graph.nodes):  # a reader comes before what it reads
        sent_before = node.name in has_run and is_collective(node)
        if not node.users and (sent_before or not node.is_impure()):
            graph.erase_node(node)
    graph.lint()
    backward.recompile()
    return backward
