"""The eager compiler: runs the two graphs op by op, as plain torch would, with the partitioner in between.

The nvFuser compiler uses it too, and runs the two graphs otherwise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from ..._torch.tracing import aot_autograd, boxed, forget_donated_buffers
from ..choose.partitioners import Partitioner
from ..cut import before_cut, before_run, before_trace


def compile_eager(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition: Partitioner,
    torch_random: bool,
    compiler: str = "eager",
    runnable: Callable[[fx.GraphModule], Callable[[list[Any]], Any]] = boxed,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph, cut them, and return a function that runs them op by op.

    The nvFuser compiler passes the last three arguments.

    Args:
        graph_module: the graph; the call changes it.
        example_inputs: the inputs of the first call.
        partition: cuts the joint graph.
        torch_random: draw torch's dropout masks from torch's generator, in eager's order, not from seeds.
        compiler: the compiler's name, which the partitioner gets too: this library's price the graph by it.
        runnable: makes a function from one graph; the function takes one list of inputs and empties it.
        decompositions: for each ATen op to decompose, a function in terms of other ops.
    """

    def cut(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        joint_module = before_cut(joint_module, compiler=compiler, torch_random=torch_random)
        return partition(joint_module, joint_inputs, compiler=compiler, **options)

    def run(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        forget_donated_buffers()
        return runnable(before_run(graph_module, compiler=compiler))

    def run_alone(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # A checkpoint's first forward runs without gradients, and needs the masks of the graph with a backward.
        return run(before_cut(graph_module, compiler=compiler, torch_random=torch_random), inputs)

    backend = aot_autograd(
        keep_unused_draws=torch_random,
        fw_compiler=run,
        inference_compiler=run_alone,
        partition_fn=cut,
        keep_inference_input_mutations=True,
        decompositions=decompositions,
    )
    return backend(before_trace(graph_module, compiler=compiler, torch_random=torch_random), example_inputs)
