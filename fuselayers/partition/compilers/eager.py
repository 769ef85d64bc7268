"""The eager compiler: runs the two graphs op by op, as plain torch would, with the partitioner in between."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from ..partitioners import Partitioner, partitioner
from ..torch_private import aot_autograd, make_boxed_func

__all__ = ["compile_eager"]


def compile_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, partition: str | Partitioner
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph, cut them, and return a function that runs them."""
    backend = aot_autograd(
        fw_compiler=_run_as_it_is,
        partition_fn=partitioner(partition, fused=False),
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = backend(graph_module, example_inputs)
    return compiled


def _run_as_it_is(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    # fx generates straight-line Python that drops each value after its last use.
    run: Callable[..., Any] = make_boxed_func(graph_module.forward)
    return run
