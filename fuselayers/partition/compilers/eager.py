"""The eager compiler: runs the two graphs op by op, as plain torch would, with the partitioner in between.

`compile_ahead_of_time` traces and cuts a graph. The nvFuser compiler uses it too, and runs the two graphs otherwise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from ..._torch.tracing import aot_autograd, boxed, forget_donated_buffers
from ..choose.partitioners import Partitioner
from ..passes import (
    attention_calls_pass,
    onednn_products_pass,
    plain_dropout_calls_pass,
    replayed_dropout_pass,
    seeded_dropout_pass,
    views_that_copy_pass,
)


def compile_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, partition: Partitioner, torch_random: bool
) -> Callable[..., Any]:
    """Return a function that runs forward and backward of a Dynamo graph op by op. See `compile_ahead_of_time`."""
    return compile_ahead_of_time(
        graph_module,
        example_inputs,
        compiler="eager",
        runnable=lambda cut_module: boxed(onednn_products_pass(views_that_copy_pass(cut_module))),
        partition=partition,
        torch_random=torch_random,
    )


def compile_ahead_of_time(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler: str,
    runnable: Callable[[fx.GraphModule], Callable[[list[Any]], Any]],
    partition: Partitioner,
    torch_random: bool,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph, cut them, and return a function that runs them.

    Used by the compilers that run a graph themselves, eager and nvFuser.

    Args:
        graph_module: the graph; the call changes it.
        example_inputs: the inputs of the first call.
        compiler: the compiler's name, which the partitioner gets too: this library's price the graph by it.
        runnable: makes a function from one graph; the function takes one list of inputs and empties it.
        partition: cuts the joint graph.
        torch_random: draw torch's dropout masks from torch's generator, in eager's order, not from seeds.
        decompositions: for each ATen op to decompose, a function in terms of other ops.
    """
    no_mask_pass = replayed_dropout_pass if torch_random else seeded_dropout_pass

    def partition_fn(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        return partition(no_mask_pass(joint_module), joint_inputs, compiler=compiler, **options)

    def one_compiler(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        forget_donated_buffers()
        return runnable(graph_module)

    def inference_compiler(inference_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # A checkpoint's first forward runs without gradients, and needs the masks of the graph with a backward.
        return one_compiler(no_mask_pass(inference_module), inputs)

    backend = aot_autograd(
        keep_unused_draws=torch_random,
        fw_compiler=one_compiler,
        inference_compiler=inference_compiler,
        partition_fn=partition_fn,
        keep_inference_input_mutations=True,
        decompositions=decompositions,
    )
    graph_module = attention_calls_pass(plain_dropout_calls_pass(graph_module), torch_random=torch_random)
    return backend(graph_module, example_inputs)
