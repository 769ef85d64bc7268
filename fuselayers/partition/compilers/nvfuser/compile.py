"""The nvFuser compiler: nvFuser runs elementwise ops and reductions, and torch runs the rest op by op."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from ...._torch.tracing import boxed
from ...partitioners import Partitioner
from ...passes import dropout_in_place_pass, merge_equal_nodes_pass, seeded_dropout_calls_pass
from ..ahead_of_time import compile_ahead_of_time
from .availability import fused_device_types
from .decompositions import nvfuser_decompositions
from .definitions import Region
from .regions import extract, groups_of


def compile_nvfuser(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, partition: str | Partitioner, torch_random: bool
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph, cut them, and return a function whose regions run in nvFuser.

    Args:
        graph_module: the graph; it is changed.
        example_inputs: the inputs of the first call.
        partition: chooses the values that are saved.
        torch_random: draw torch's dropout masks from torch's generator, in eager's order, not from seeds.
    """
    return compile_ahead_of_time(
        dropout_in_place_pass(graph_module) if torch_random else with_masks_for_nvfuser(graph_module),
        example_inputs,
        compiler="nvfuser",
        runnable=_runnable,
        partition=partition,
        torch_random=torch_random,
        decompositions=nvfuser_decompositions(),
    )


def with_masks_for_nvfuser(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Replace torch's dropout in a Dynamo graph by our formula, so that the kernel that uses the mask makes it."""
    device_types = fused_device_types() | {"cpu"}
    return seeded_dropout_calls_pass(dropout_in_place_pass(graph_module), device_types=device_types)


def _runnable(graph_module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    return boxed(with_regions(merge_equal_nodes_pass(graph_module)))


def with_regions(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Replace each group of ops that nvFuser can run by a call of a `Region`."""
    graph_module.graph.eliminate_dead_code()
    device = _device_of(graph_module.graph)
    if device is None:
        return graph_module
    groups = groups_of(graph_module, device)
    return extract(graph_module, groups, functools.partial(Region, device=device))


def _device_of(graph: fx.Graph) -> torch.device | None:
    """The first device in the graph that nvFuser compiles for; torch runs the ops on other devices."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type in fused_device_types():
            return value.device
    return None
