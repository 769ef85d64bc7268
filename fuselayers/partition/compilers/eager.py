"""The eager compiler: runs the two graphs op by op, as plain torch would, with the partitioner in between."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from ..._torch.tracing import boxed
from ..partitioners import Partitioner
from ..passes import dropout_in_place_pass
from .ahead_of_time import compile_ahead_of_time


def compile_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, partition: str | Partitioner, torch_random: bool
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph, cut them, and return a function that runs them op by op.

    Args:
        graph_module: the graph; it is used up.
        example_inputs: the inputs of the first call.
        partition: as in `fuse`.
        torch_random: draw torch's dropout masks from torch's generator, in eager's order, not from seeds.
    """
    return compile_ahead_of_time(
        dropout_in_place_pass(graph_module),
        example_inputs,
        compiler="eager",
        runnable=boxed,
        partition=partition,
        torch_random=torch_random,
    )
