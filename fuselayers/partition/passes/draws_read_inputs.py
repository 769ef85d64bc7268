"""draws_read_inputs -- a draw of a seed reads an input, where it read a tensor that was made for it alone."""

import torch
import torch.fx as fx

from .seeded_dropout import SEED_OP


def draws_read_inputs_pass(forward: fx.GraphModule) -> fx.GraphModule:
    """Let each draw of a seed read the forward's first tensor, and remove the empty permutation that it read.

    Without the permutation torch's own partitioner would merge two draws, see `ops.draw`. After the cut nothing merges
    them, and on a GPU each permutation takes a kernel, which fills a scalar: 18 of the 312 launches of a step of
    gpt_nano with six layers.
    """
    graph = forward.graph
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    first = next((node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)), None)
    for draw in graph.find_nodes(op="call_function", target=SEED_OP):
        permutation = draw.args[0]
        if first is None or getattr(permutation, "target", None) is not torch.ops.aten.randperm.default:
            continue
        draw.args = (first,)
        if not permutation.users:
            graph.erase_node(permutation)
    graph.lint()
    forward.recompile()
    return forward
