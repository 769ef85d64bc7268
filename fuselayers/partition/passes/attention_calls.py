"""attention_calls -- replace torch's attention by `ops.attention`: faster on a CPU, and with the library's masks."""

import torch.fx as fx
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention

from ..._torch.tracing import all_nodes, recompiled
from ...ops.attention.torch_calls import attention_of_torch_call, multi_head_of_torch_call


def attention_calls_pass(graph_module: fx.GraphModule, *, torch_random: bool) -> fx.GraphModule:
    """Replace `F.scaled_dot_product_attention` in a Dynamo graph, where tensors may still be on any device.

    On a CPU torch has a kernel only for calls that drop nothing, and for biases without a gradient. For others it
    stores three tensors of [..., T, S]: the weights, a mask and their product. On a GPU only calls that drop change:
    their masks are those of a CPU.

    Args:
        graph_module: the graph; the call changes it.
        torch_random: leave calls that may drop to torch, whose masks come from its generator.
    """
    for node in all_nodes(graph_module):
        if node.target is scaled_dot_product_attention:
            p = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
            if not torch_random or p == 0:
                node.target = attention_of_torch_call
        elif node.target is multi_head_attention_forward and not torch_random:
            node.target = multi_head_of_torch_call
    return recompiled(graph_module)
