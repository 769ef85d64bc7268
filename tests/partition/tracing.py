"""Joint graphs and their cuts for the partition tests, and the allocator's peak in a training step."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.layers import GPT
from fuselayers.partition import CapturedGraph, Partitioner, capture, partitioner
from fuselayers.partition.choose.cost import flops_of
from fuselayers.partition.joint_graph import JointGraph

__all__ = ["Hand", "gpt", "joint_graph_of", "ops_of", "peak_of_step", "recomputed_flops", "saved_of", "split_of"]


class Hand:
    """A graph made by hand, with inputs of these names. Its values are vectors of four numbers."""

    def __init__(self, *names: str) -> None:
        self.graph = fx.Graph()
        self.inputs = [self.graph.placeholder(name) for name in names]
        for node in self.inputs:
            node.meta["val"] = torch.ones(4)

    def call(self, target: Any, *arguments: Any, **meta: Any) -> fx.Node:
        node = self.graph.call_function(target, arguments)
        node.meta = {"val": torch.ones(4), **meta}
        return node

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule({}, self.graph)


def joint_graph_of(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> JointGraph:
    """The joint graph of `fn` without Inductor's decompositions, not yet split."""
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        (graph,) = capture(fn, *args, backend="eager")
    return graph.joint()


def split_of(fn: Callable[..., Any], *args: Any, partition: str | Partitioner, fused: bool = True) -> Any:
    """The forward and the backward module that a partitioner makes of `fn`."""
    (graph,) = capture(fn, *args, backend="eager")
    return partitioner(partition)(
        graph.module,
        graph.joint_inputs,
        num_fwd_outputs=graph.num_forward_outputs,
        static_lifetime_input_indices=list(graph.static_input_indices),
        compiler="inductor" if fused else "eager",
    )


@functools.cache
def gpt() -> CapturedGraph:
    """The joint graph of a GPT of two layers from Inductor, traced once; tests take copies of it."""
    tokens = torch.zeros(2, 32, dtype=torch.long)
    (graph,) = capture(GPT(2, hidden_dim=64, context_length=64, vocab_size=128), tokens, tokens)
    return graph


def recomputed_flops(joint: JointGraph, saved: list[fx.Node]) -> float:
    """The FLOPs of the recomputed nodes."""
    return sum(flops_of(node) for node in joint.recomputed(saved))


def peak_of_step(model: nn.Module, *inputs: Any) -> int:
    """The peak bytes that forward and backward allocate, measured by torch's profiler."""
    leaves = [tensor for tensor in (*inputs, *model.parameters()) if tensor.requires_grad]

    def step(weights: list[Tensor] | None = None) -> list[Tensor]:
        results = [result for result in tree_leaves(model(*inputs)) if isinstance(result, Tensor)]
        results = [result for result in results if result.requires_grad]
        weights = weights or [torch.ones_like(result) for result in results]
        torch.autograd.grad(results, leaves, weights, allow_unused=True)
        return weights

    weights = step()  # compiles
    with torch.profiler.profile(profile_memory=True) as profile:
        step(weights)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(allocated))


def ops_of(module: fx.GraphModule) -> list[str]:
    """The names of a graph's ops without overload and namespace: "sin" for aten.sin.default."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    return [str(getattr(node.target, "overloadpacket", node.target).__name__) for node in nodes]


def saved_of(forward: Any, *, outputs: int = 1) -> list[fx.Node]:
    """The nodes that a forward module saves for its backward."""
    return list(forward.graph.output_node().args[0][outputs:])
