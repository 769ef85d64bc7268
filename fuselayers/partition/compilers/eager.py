"""The eager compiler: runs the two graphs op by op, as plain torch would, with the partitioner in between."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from ..._torch.tracing import boxed
from ..choose.partitioners import Partitioner
from ..passes import views_that_copy_pass
from .ahead_of_time import compile_ahead_of_time


def compile_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, partition: str | Partitioner, torch_random: bool
) -> Callable[..., Any]:
    """Return a function that runs forward and backward of a Dynamo graph op by op. See `compile_ahead_of_time`."""
    return compile_ahead_of_time(
        graph_module,
        example_inputs,
        compiler="eager",
        runnable=lambda cut_module: boxed(views_that_copy_pass(cut_module)),
        partition=partition,
        torch_random=torch_random,
    )
