"""The joint forward and backward graph, as partitioners see it."""

import functools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx

from .._torch.tracing import (
    extract_forward_and_backward,
    forward_inputs,
    is_sym_node,
    is_tagged_backward,
    must_recompute,
    mutated_inputs,
    placement,
)
from .node_kinds import (
    behind_gradients,
    is_fusible,
    looks_at_its_input,
    num_bytes,
    only_moves,
    prefers_save,
    readers_of,
    storage_of,
    why_not_saveable,
    why_runs_once,
)
from .passes import (
    MASK_OPS,
    Compression,
    Sensitive,
    checkpoint_tags_pass,
    compress_saved_pass,
    early_getitems_pass,
    held_by_caller,
    joined_kernels_pass,
    keep_mutated_inputs_pass,
    late_recompute_pass,
    merge_equal_nodes_pass,
    one_mask_pass,
    one_permutation_pass,
    recompute_again_pass,
    sensitive_in,
    tables_once_pass,
    unread_collectives_pass,
    way_for,
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
        num_forward_outputs: how many of its outputs are the forward's; the others are gradients.
        forward: the nodes that the forward's outputs depend on.
        backward: the nodes that must be in backward: those that depend on an incoming gradient, and every result.
        from_gradients: the nodes that depend on an incoming gradient; forward cannot compute them.
        inputs: the forward's inputs, parameters included.
        static_inputs: the inputs that outlive the call, such as parameters; saving them costs nothing.
        mutated_inputs: the inputs that are written to; backward would read the new value.
        compress: how saved values are compressed, or None.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    forward: frozenset[fx.Node]
    backward: frozenset[fx.Node]
    from_gradients: frozenset[fx.Node]
    inputs: frozenset[fx.Node]
    static_inputs: frozenset[fx.Node]
    mutated_inputs: frozenset[fx.Node]
    compress: Compression | None = None

    @classmethod
    def of(
        cls,
        module: fx.GraphModule,
        *,
        num_forward_outputs: int,
        static_input_indices: Sequence[int] | None,
        compress: Compression | None = None,
    ) -> "JointGraph":
        """Tidy a joint graph from AOTAutograd (dead code, equal nodes, checkpoint tags) and sort its nodes."""
        module.graph.eliminate_dead_code()
        module = checkpoint_tags_pass(merge_equal_nodes_pass(keep_mutated_inputs_pass(module)))
        nodes = [node for node in module.graph.nodes if node.op != "output"]
        behind = behind_gradients(nodes)
        outputs: Any = module.graph.output_node().args[0]
        gradients = [value for value in outputs[num_forward_outputs:] if isinstance(value, fx.Node)]
        inputs = forward_inputs(module.graph)
        # A node with a side effect belongs to the forward although no output depends on it.
        rest = [node for node in nodes if node not in behind and node.op != "placeholder"]
        forward = set(inputs)
        stack = [node for node in rest if node.is_impure()]
        stack += [node for node in outputs[:num_forward_outputs] if isinstance(node, fx.Node)]
        while stack:
            node = stack.pop()
            if node not in forward and node not in behind:
                forward.add(node)
                stack += node.all_input_nodes
        static = set(static_input_indices or ())
        return cls(
            module=module,
            num_forward_outputs=num_forward_outputs,
            forward=frozenset(forward),
            backward=frozenset([*behind, *gradients]),
            from_gradients=frozenset(behind),
            inputs=frozenset(inputs),
            static_inputs=frozenset(node for index, node in enumerate(inputs) if index in static),
            mutated_inputs=frozenset(mutated_inputs(module.graph)),
            compress=compress,
        )

    @property
    def nodes(self) -> list[fx.Node]:
        """Every node but the output, in the order of the graph."""
        return [node for node in self.module.graph.nodes if node.op != "output"]

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
            cheap = why_runs_once(node) is None and _is_cheap(node) and not prefers_save(node)
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

    def has_unfused_reader(self, node: fx.Node, *, forward: bool) -> bool:
        """True if an unfused op of forward, or of backward, reads the value or a view: then it has to be in memory."""
        return any((user in self.forward) == forward and not is_fusible(user) for user in readers_of(node))

    @functools.cached_property
    def returned(self) -> frozenset[fx.Node]:
        """The storages of the forward's outputs."""
        outputs: Any = self.module.graph.output_node().args[0]
        nodes = (value for value in outputs[: self.num_forward_outputs] if isinstance(value, fx.Node))
        return frozenset(storage_of(node) for node in nodes)

    @functools.cached_property
    def compressed(self) -> dict[fx.Node, int]:
        """The values that are compressed if they are saved, with their compressed bytes."""
        ways = {node: self.way_of(node) for node in self.needed}
        return {node: way.bytes_of(node) for node, way in ways.items() if not isinstance(way, str)}

    def way_of(self, node: fx.Node) -> Compression | str:
        """Return how the value is compressed if it is saved, or why it is saved exactly."""
        if self.compress is None:
            return "nothing is compressed"
        held, sensitive = self._held_and_sensitive
        return way_for(node, self.compress, held=held, sensitive=sensitive)

    @functools.cached_property
    def _held_and_sensitive(self) -> tuple[Collection[fx.Node], Sensitive]:
        outputs: Any = self.module.graph.output_node().args[0]
        inputs = [node for node in self.nodes if node in self.inputs]
        static = {node.name for node in self.static_inputs}
        needed = {*self.needed, *self.from_gradients}
        number = self.num_forward_outputs
        held = held_by_caller(inputs, outputs[number:], outputs[:number], static=static)
        return held, sensitive_in([node for node in self.nodes if node in needed])

    def saved_bytes(self, saved_values: Sequence[fx.Node]) -> int:
        """Bytes saved with these values: the compressed bytes, and each other storage once. Static inputs are free."""
        storages = dict.fromkeys(storage_of(node) for node in saved_values if node not in self.compressed)
        fewer = sum(self.compressed.get(node, 0) for node in saved_values)
        return fewer + sum(num_bytes(node) for node in storages if node not in self.static_inputs)

    def recomputed(self, saved_values: Sequence[fx.Node]) -> list[fx.Node]:
        """The ops of the forward that run a second time in backward when these values are saved."""
        again = self._behind_backward(frozenset(saved_values))
        return [node for node in again if self.runs_in_forward(node) and node.op == "call_function"]

    def split(
        self, saved_values: Sequence[fx.Node], *, kept: Sequence[fx.Node] = ()
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward module, which also returns the saved values, and the backward module, which takes them.

        With `kept`, backward first recomputes these values and keeps them. It recomputes the others from them right
        before they are read, most of them for the second time.
        """
        forward, backward = extract_forward_and_backward(
            tables_once_pass(self.module, self.made_from_scalars),
            list(saved_values),
            num_fwd_outputs=self.num_forward_outputs,
            static_inputs=self.static_inputs,
        )
        backward = unread_collectives_pass(backward, forward)
        if kept:
            backward = recompute_again_pass(backward, {node.name for node in kept})
        backward = joined_kernels_pass(early_getitems_pass(one_mask_pass(late_recompute_pass(backward))))
        forward = joined_kernels_pass(early_getitems_pass(one_permutation_pass(forward)))
        if self.compress is None:
            return forward, backward
        return compress_saved_pass(
            forward,
            backward,
            self.compress,
            num_forward_outputs=self.num_forward_outputs,
            static_inputs={node.name for node in self.static_inputs},
        )


def _is_cheap(node: fx.Node) -> bool:
    """True for ops that cost next to nothing to recompute: elementwise ops, views, and the ops that make masks.

    A cumulative sum is among them: transformers' attention masks number the documents of a row with it.
    """
    known = only_moves(node) or node.target in MASK_OPS or node.target is torch.ops.aten.cumsum.default
    return known or is_sym_node(node) or is_fusible(node) or looks_at_its_input(node) or node.target is operator.getitem


@dataclass(frozen=True)
class CutGraph:
    """A joint graph and the two graphs that it was cut into; their nodes have the same names."""

    joint: JointGraph
    forward: fx.GraphModule
    backward: fx.GraphModule
