"""one_mask -- make a dropout's mask once in backward, for its gradient and for the recomputed dropped values."""

from typing import Any

import torch.fx as fx

from ..._torch.tracing import recompiled
from .seeded_dropout import MASK_OPS


def one_mask_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Merge each mask of a backward graph with the mask before it, if the two are equal.

    An op's backward makes its mask again, with the argument `again`, so that torch's partitioner does not merge it with
    forward's mask and save it. If backward also recomputes the dropped values, it has the same mask twice. Masks are
    not merged across another mask, so that at most one mask waits in memory for its second reader.

    The backward of gpt_nano, 8x128, takes 1.9 % less time with AVX-512 and 1.7 % less with AVX2 (two cores of an AMD
    EPYC): it makes 10 masks instead of 20.
    """
    graph = graph_module.graph
    last, last_key = None, None
    for node in [node for node in graph.nodes if node.target in MASK_OPS]:
        key: Any = node.target, node.args, {name: value for name, value in node.kwargs.items() if name != "again"}
        if last is not None and key == last_key:
            node.replace_all_uses_with(last)
            graph.erase_node(node)
        else:
            last, last_key = node, key
    return recompiled(graph_module)
