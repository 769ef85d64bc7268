"""one_mask -- make each dropout's mask once in backward, for its gradient and for the dropped values made again."""

from typing import Any

import torch.fx as fx

from .merge_equal_nodes import hashable
from .seeded_dropout import mask_ops


def one_mask_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Merge masks of equal arguments in a backward graph.

    An op's backward makes its own mask and says so by `again`, so that torch's partitioner does not merge it with
    forward's and save it. In backward the two are one: recomputing a dropped value would make forward's a third time.
    """
    graph = graph_module.graph
    first: dict[Any, fx.Node] = {}
    for node in [node for node in graph.nodes if node.target in mask_ops()]:
        others = {name: value for name, value in node.kwargs.items() if name != "again"}
        equal = first.setdefault((node.target, hashable(node.args), hashable(others)), node)
        if equal is not node:
            node.replace_all_uses_with(equal)
            graph.erase_node(node)
    graph.lint()
    graph_module.recompile()
    return graph_module
