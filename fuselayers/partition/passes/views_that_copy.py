"""views_that_copy -- let a graph that runs op by op view a value whose strides are not the traced ones."""

import torch
import torch.fx as fx

from ..._torch.tracing import recompiled


def views_that_copy_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Turn each view into a reshape, which copies where the strides rule a view out.

    torch traces some results with other strides than its kernels return: the gradient of `F.dropout` behind a
    transposed linear is contiguous in the graph, and transposed when it runs.
    """
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    return recompiled(graph_module)
