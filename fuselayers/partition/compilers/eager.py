"""The eager compiler: runs the two graphs op by op, as plain torch would, with the partitioner in between."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from ..partitioners import Partitioner, SavingRule, partitioner
from ..passes import dropout_in_place_pass, replayed_dropout_pass, seeded_dropout_pass
from ..torch_private import aot_autograd, forget_donated_buffers
from .straight_line import straight_line

__all__ = ["compile_eager"]


def compile_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, partition: str | Partitioner, torch_random: bool
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph, cut them, and return a function that runs them.

    Args:
        graph_module: the graph; it is used up.
        example_inputs: what it will be called with first.
        partition: what to save.
        torch_random: draw torch's dropout masks from torch's generator, in eager's order, not from seeds.
    """
    own = partitioner(partition)
    # Ours have prices for a graph that is run op by op; a user's partitioner keeps the signature it has.
    cut: Callable[..., Any] = functools.partial(own, compiler="eager") if isinstance(own, SavingRule) else own
    no_mask_pass = replayed_dropout_pass if torch_random else seeded_dropout_pass

    def partition_fn(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        return cut(no_mask_pass(joint_module), joint_inputs, **options)

    def inference_compiler(inference_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # The masks must be those of the graph with a backward: a checkpoint runs its first forward without gradients.
        return _straight_line(no_mask_pass(inference_module), inputs)

    backend = aot_autograd(
        fw_compiler=_straight_line,
        inference_compiler=inference_compiler,
        partition_fn=partition_fn,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = backend(dropout_in_place_pass(graph_module), example_inputs)
    return compiled


def _straight_line(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    forget_donated_buffers()
    return straight_line(graph_module)
