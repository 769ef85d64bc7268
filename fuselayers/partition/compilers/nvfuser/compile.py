"""The nvFuser compiler: nvFuser runs elementwise ops and reductions, and torch runs the rest op by op."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.fx as fx

from ...._torch.tracing import boxed, decompositions_of
from ...choose.partitioners import Partitioner
from ..eager import compile_eager
from . import availability
from .definitions import Region
from .regions import extract, groups_of

# nvFuser has no operation for these, or only one for forward: norms, softmaxes and the activations of this library. Its
# own operations (`exp`, `silu`, sums, `var_mean`) are not decomposed, nor are the ops that torch runs: matmuls,
# attention, convolutions, group norms, embeddings, indexing, other losses and activations. torch's dropout is not
# decomposed either, because a later pass replaces it.
_DECOMPOSED: Final = (
    *("_fused_rms_norm", "_fused_rms_norm_backward", "_log_softmax", "_log_softmax_backward_data", "_safe_softmax"),
    *("_softmax", "_softmax_backward_data", "gelu", "gelu_backward", "leaky_relu", "leaky_relu_backward", "logsumexp"),
    *("masked_fill", "mean", "native_layer_norm", "native_layer_norm_backward", "new_full", "new_zeros", "ones"),
    *("ones_like", "rsub", "sigmoid_backward", "silu_backward", "softplus", "softplus_backward", "t", "tanh_backward"),
    *("threshold", "threshold_backward", "transpose", "zeros", "zeros_like"),
)


def compile_nvfuser(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition: Partitioner,
    torch_random: bool,
    op_by_op: bool = False,
) -> Callable[..., Any]:
    """Return a function that runs forward and backward of a Dynamo graph. See `compile_eager`.

    Regions of each graph run in nvFuser; with `op_by_op` none do.
    """
    return compile_eager(
        graph_module,
        example_inputs,
        compiler="nvfuser",
        runnable=boxed if op_by_op else _runnable,
        partition=partition,
        torch_random=torch_random,
        decompositions=decompositions_of(_DECOMPOSED),
    )


def _runnable(graph_module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Replace each group of ops that nvFuser can run by a call of a `Region`."""
    graph_module.graph.eliminate_dead_code()
    values = (node.meta.get("val") for node in graph_module.graph.nodes)
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    # A graph may have several devices. nvFuser gets the ops on the first that it compiles for, and torch the others.
    device = next((device for device in devices if device.type in availability.DEVICE_TYPES), None)
    if device is not None:
        extract(graph_module, groups_of(graph_module, device), functools.partial(Region, device=device))
    return boxed(graph_module)
