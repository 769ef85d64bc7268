"""ahead_of_time -- a Dynamo graph to forward and backward, cut by a partitioner, each handed to one way of running it.

What the compilers that run a graph themselves have in common; Inductor brings its own.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx as fx

from ..._torch.tracing import aot_autograd, forget_donated_buffers
from ..partitioners import Partitioner, SavePolicy, partitioner
from ..passes import replayed_dropout_pass, seeded_dropout_pass

__all__ = ["compile_ahead_of_time"]


def compile_ahead_of_time(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler: str,
    runnable: Callable[[fx.GraphModule], Callable[[list[Any]], Any]],
    partition: str | Partitioner,
    torch_random: bool,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph, cut them, and return a function that runs them.

    Args:
        graph_module: the graph; it is used up.
        example_inputs: what it will be called with first.
        compiler: for whom partitioners of this library price the graph.
        runnable: makes a function of one list of inputs, which it empties, from one graph.
        partition: what to save.
        torch_random: draw torch's dropout masks from torch's generator, in eager's order, not from seeds.
        decompositions: ATen ops to write in terms of others, with the functions that do so.
    """
    own = partitioner(partition)
    # A user's partitioner keeps the signature it has.
    cut: Callable[..., Any] = functools.partial(own, compiler=compiler) if isinstance(own, SavePolicy) else own
    no_mask_pass = replayed_dropout_pass if torch_random else seeded_dropout_pass

    def partition_fn(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        return cut(no_mask_pass(joint_module), joint_inputs, **options)

    def one_compiler(one: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        forget_donated_buffers()
        return runnable(one)

    def inference_compiler(inference_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # The masks must be those of the graph with a backward: a checkpoint runs its first forward without gradients.
        return one_compiler(no_mask_pass(inference_module), inputs)

    backend = aot_autograd(
        fw_compiler=one_compiler,
        inference_compiler=inference_compiler,
        partition_fn=partition_fn,
        keep_inference_input_mutations=True,
        decompositions=None if decompositions is None else dict(decompositions),
    )
    compiled: Callable[..., Any] = backend(graph_module, example_inputs)
    return compiled
