"""The joint forward and backward graph, as partitioners see it: data. `cut` makes it and splits it."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.fx as fx

from .._torch.tracing import (
    forward_inputs,
    is_sym_node,
    is_tagged_backward,
    must_recompute,
    mutated_inputs,
    placement,
)
from .node_kinds import (
    behind_gradients,
    is_cheap,
    num_bytes,
    prefers_save,
    storage_of,
    why_not_saveable,
    why_runs_once,
)

_SCALAR_BYTES: Final = 16


class PartitionError(ValueError):
    """No backend can cut a graph as requested: a value can neither be saved nor recomputed, a budget is too small, or a
    user's partitioner does not return two graphs. No fallback is tried, since it would get the same graph."""


@dataclass(frozen=True)
class JointGraph:
    """A traced forward and backward, with its nodes sorted by the graph that needs them.

    Attributes:
        module: the joint graph; its placeholders are the forward's inputs, then the gradients of the outputs.
        nodes: every node but the output, in the order of the graph.
        device_types: the types of the devices that tensors are on, in that order.
        num_forward_outputs: how many of its outputs are the forward's; the others are gradients.
        forward: the nodes that the forward's outputs depend on.
        backward: the nodes that must be in backward: those that depend on an incoming gradient, and every result.
        from_gradients: the nodes that depend on an incoming gradient; forward cannot compute them.
        inputs: the forward's inputs, parameters included.
        static_inputs: the inputs that outlive the call, such as parameters; saving them costs nothing.
        mutated_inputs: the inputs that are written to; backward would read the new value.
        compress: the compression of saved values, or None.
        compressed: the values that are compressed if they are saved, with their compressed bytes.
        why_exact: why each other value is saved exactly.
    """

    module: fx.GraphModule
    nodes: Sequence[fx.Node]
    device_types: Sequence[str]
    num_forward_outputs: int
    forward: frozenset[fx.Node]
    backward: frozenset[fx.Node]
    from_gradients: frozenset[fx.Node]
    inputs: frozenset[fx.Node]
    static_inputs: frozenset[fx.Node]
    mutated_inputs: frozenset[fx.Node]
    compress: str | None = None
    compressed: Mapping[fx.Node, int] = field(default_factory=dict)
    why_exact: Mapping[fx.Node, str] = field(default_factory=dict)

    @functools.cached_property
    def read_by_backward(self) -> frozenset[fx.Node]:
        """The values that backward reads or returns and that depend on no gradient."""
        read = set(self.backward).union(*(node.all_input_nodes for node in self.from_gradients))
        return frozenset(read - self.from_gradients)

    @functools.cached_property
    def needed(self) -> list[fx.Node]:
        """All values that backward depends on and that depend on no gradient, in the order of the graph.

        For each of these a partitioner chooses: save it, or recompute it.
        """
        return self._behind_backward(frozenset())

    def _behind_backward(self, saved: Collection[fx.Node]) -> list[fx.Node]:
        """The nodes that compute, from the saved values, the values that backward reads."""
        wanted = set(self.read_by_backward)
        behind: list[fx.Node] = []
        for node in reversed(self.nodes):
            if node in wanted and node not in saved:
                behind.append(node)
                wanted.update(node.all_input_nodes)
        return behind[::-1]

    @functools.cached_property
    def made_from_scalars(self) -> frozenset[fx.Node]:
        """The values that are larger than the scalars they are computed from: a dropout mask from its seed, an `arange`
        from its length.

        They are never saved: a few bytes and some arithmetic restore them. So no dropout mask is saved, with any
        compiler and cost model. Results of ops of unknown cost are not included.
        """
        scalars: dict[fx.Node, frozenset[fx.Node]] = {}  # for each value, the scalars that it is computed from
        for node in self.nodes:
            sources = node.all_input_nodes
            cheap = why_runs_once(node) is None and is_cheap(node) and not prefers_save(node)
            if cheap and all(source in scalars for source in sources):
                behind = frozenset().union(*(scalars[source] for source in sources))
                # A scalar that is no larger than its sources replaces them, so that a long chain's sets stay small.
                smaller = len(behind) > 1 and num_bytes(node) <= sum(map(num_bytes, behind))
                scalars[node] = frozenset({node}) if smaller and self._is_saveable_scalar(node) else behind
            elif self._is_saveable_scalar(node):
                scalars[node] = frozenset({node})
        return frozenset(node for node, behind in scalars.items() if sum(map(num_bytes, behind)) < num_bytes(node))

    def _is_saveable_scalar(self, node: fx.Node) -> bool:
        # A tuple of two scalars is as small, but cannot be saved; its elements can.
        saveable = self.why_not_saveable(node) is None and not must_recompute(node)
        # One element of a large tensor keeps all of it alive.
        return saveable and (is_sym_node(node) or 0 < num_bytes(storage_of(node)) <= _SCALAR_BYTES)

    def runs_in_forward(self, node: fx.Node) -> bool:
        """True if forward computes the node, or can compute it and it was not traced in backward.

        Only backward needs some of these nodes, such as the logsumexp that attention returns. A size counts even if it
        was traced in backward: if the size is saved, its tensor need not be.
        """
        traced_there = is_tagged_backward(node) and not is_sym_node(node)
        return node in self.forward or not (node in self.from_gradients or traced_there)

    def why_not_saveable(self, node: fx.Node) -> str | None:
        """Return None if the value can be handed from forward to backward, else why it cannot."""
        # If backward writes to the input too, forward passes it on as the memory to write to.
        written = storage_of(node) in self.mutated_inputs
        if written and not any(placement(user) == "must_be_in_backward" for user in node.users):
            return "it is overwritten before backward runs"
        return why_not_saveable(node)

    @functools.cached_property
    def returned(self) -> frozenset[fx.Node]:
        """The storages of the forward's outputs."""
        outputs: Any = self.module.graph.output_node().args[0]
        nodes = (value for value in outputs[: self.num_forward_outputs] if isinstance(value, fx.Node))
        return frozenset(storage_of(node) for node in nodes)

    def saved_bytes(self, saved_values: Sequence[fx.Node]) -> int:
        """Bytes saved with these values: the compressed bytes, and each other storage once. Static inputs are free."""
        storages = dict.fromkeys(storage_of(node) for node in saved_values if node not in self.compressed)
        fewer = sum(self.compressed.get(node, 0) for node in saved_values)
        return fewer + sum(num_bytes(node) for node in storages if node not in self.static_inputs)

    def recomputed(self, saved_values: Sequence[fx.Node]) -> list[fx.Node]:
        """The ops of the forward that run a second time in backward when these values are saved."""
        behind = self._behind_backward(frozenset(saved_values))
        return [node for node in behind if self.runs_in_forward(node) and node.op == "call_function"]


def sort_nodes(
    graph_module: fx.GraphModule, *, num_forward_outputs: int, static_input_indices: Sequence[int] | None
) -> JointGraph:
    """Return a tidied graph with its nodes sorted by the graph that needs them. Arguments: see `cut.joint_graph_of`."""
    nodes = [node for node in graph_module.graph.nodes if node.op != "output"]
    values = (node.meta.get("val") for node in nodes)
    outputs: Any = graph_module.graph.output_node().args[0]
    inputs = forward_inputs(graph_module.graph)
    behind = behind_gradients(nodes)
    # A node with a side effect belongs to the forward although no output depends on it.
    forward = set(inputs)
    stack = [node for node in nodes if node not in behind and node.op != "placeholder" and node.is_impure()]
    stack += [node for node in outputs[:num_forward_outputs] if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in forward and node not in behind:
            forward.add(node)
            stack += node.all_input_nodes
    static = set(static_input_indices or ())
    return JointGraph(
        module=graph_module,
        nodes=nodes,
        device_types=[value.device.type for value in values if isinstance(value, torch.Tensor)],
        num_forward_outputs=num_forward_outputs,
        forward=frozenset(forward),
        backward=frozenset(behind).union(node for node in outputs[num_forward_outputs:] if isinstance(node, fx.Node)),
        from_gradients=frozenset(behind),
        inputs=frozenset(inputs),
        static_inputs=frozenset(node for index, node in enumerate(inputs) if index in static),
        mutated_inputs=frozenset(mutated_inputs(graph_module.graph)),
    )


@dataclass(frozen=True)
class CutGraph:
    """A joint graph and the two graphs that it was cut into; their nodes have the same names."""

    joint: JointGraph
    forward: fx.GraphModule
    backward: fx.GraphModule
