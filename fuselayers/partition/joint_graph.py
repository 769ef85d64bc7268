"""The joint forward and backward graph, as partitioners see it."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from .merge_equal_nodes import merge_equal_nodes
from .torch_private import (
    CheckpointPolicy,
    classify_nodes,
    extract_forward_and_backward,
    is_opaque,
    is_sym_node,
    known_ops,
    mark_forced_saves,
    overload_packet,
    size_of,
)

__all__ = [
    "JointGraph",
    "is_fusible",
    "is_recomputable",
    "is_saveable",
    "is_view",
    "made_from_scalars",
    "num_bytes",
    "runs_once",
]

# What Inductor makes of dropout and rand: pure functions of a saved seed, so computing them again gives the same mask.
_SEEDED_RANDOM: Final = tuple(
    getattr(torch.ops.prims, name)
    for name in ("inductor_lookup_seed", "inductor_random", "inductor_randint")
    if hasattr(torch.ops.prims, name)
)
_SCALAR_BYTES: Final = 16
_COLLECTIVES: Final = ("_c10d_functional", "_dtensor")


@dataclass(frozen=True)
class JointGraph:
    """A traced forward and backward, with each node sorted by which of the two needs it.

    Attributes:
        module: the joint graph; its placeholders are the forward's inputs, then the gradients of the outputs.
        num_forward_outputs: how many of its outputs are the forward's; the others are gradients.
        forward: the nodes that the forward's outputs depend on.
        backward: the nodes that must be present in backward: what depends on an incoming gradient, and every result.
        from_gradients: the nodes that depend on an incoming gradient; forward cannot compute them.
        inputs: the forward's inputs, parameters included.
        static_inputs: the inputs that outlive the call anyway, such as parameters; keeping them costs nothing.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    forward: frozenset[fx.Node]
    backward: frozenset[fx.Node]
    from_gradients: frozenset[fx.Node]
    inputs: frozenset[fx.Node]
    static_inputs: frozenset[fx.Node]

    @classmethod
    def of(
        cls, module: fx.GraphModule, *, num_forward_outputs: int, static_input_indices: Sequence[int] | None
    ) -> "JointGraph":
        """Tidy a joint graph from AOTAutograd (dead code, equal nodes, checkpoint tags) and sort its nodes."""
        module.graph.eliminate_dead_code()
        module = mark_forced_saves(merge_equal_nodes(module))
        info = classify_nodes(module, list(static_input_indices or ()), num_forward_outputs)
        return cls(
            module=module,
            num_forward_outputs=num_forward_outputs,
            forward=frozenset(info.required_fw_nodes),
            backward=frozenset(node for node in info.required_bw_nodes if node.op != "output"),
            from_gradients=frozenset(node for node in info.tangents_closure if node.op != "output"),
            inputs=frozenset(info.inputs),
            static_inputs=frozenset(info.static_lifetime_input_nodes),
        )

    @property
    def nodes(self) -> list[fx.Node]:
        """Every node but the output, in the order of the graph."""
        return [node for node in self.module.graph.nodes if node.op != "output"]

    def split(self, saved_values: Sequence[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward module, which also returns the saved values, and the backward module, which takes them."""
        return extract_forward_and_backward(
            self.module,
            list(saved_values),
            num_fwd_outputs=self.num_forward_outputs,
            static_inputs=self.static_inputs,
        )


def num_bytes(node: fx.Node) -> int:
    """Bytes of a node's value; sizes that are still symbolic count with their hint."""
    return size_of(node) if isinstance(node.meta.get("val"), torch.Tensor | list | tuple) else 0


def is_saveable(node: fx.Node) -> bool:
    """True if the value can be handed from forward to backward: a tensor, an integer size, an opaque object."""
    value = node.meta.get("val")
    if is_sym_node(node):
        return not isinstance(value, torch.SymFloat)
    return isinstance(value, torch.Tensor) or is_opaque(node)


def is_view(node: fx.Node) -> bool:
    """True if the op looks at its input's memory in another way, which costs nothing."""
    if node.op != "call_function":
        return False
    if overload_packet(node) in known_ops().view_ops:
        return True
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def is_fusible(node: fx.Node) -> bool:
    """True if a compiler fuses the op into the kernels around it."""
    packet = overload_packet(node)
    return node.op == "call_function" and (packet in known_ops().fusible_ops or packet in _SEEDED_RANDOM)


def runs_once(node: fx.Node) -> bool:
    """True if running the op a second time would do something else: random draws, mutations, collectives, and what the
    user's checkpoint policy wants saved."""
    if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or overload_packet(node) in _SEEDED_RANDOM:
        return False
    has_effect = target._schema.is_mutable or target.namespace in _COLLECTIVES
    return has_effect or torch.Tag.nondeterministic_seeded in target.tags


def is_recomputable(node: fx.Node) -> bool:
    """True if the op may run a second time in backward, and is cheap: no matmul, no attention, no fresh randomness."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    packet = overload_packet(node)
    return not runs_once(node) and (packet in known_ops().recomputable_ops or packet in _SEEDED_RANDOM)


def _is_saveable_scalar(node: fx.Node) -> bool:
    # A tuple of two scalars is as small, but cannot be saved; its elements can.
    return is_saveable(node) and (is_sym_node(node) or 0 < num_bytes(node) <= _SCALAR_BYTES)


def made_from_scalars(joint: JointGraph) -> frozenset[fx.Node]:
    """Return what is computed from nothing but scalars: a dropout mask from its seed, an `arange` from its length.

    They are never worth saving: eight bytes and some arithmetic bring them back. This is what keeps the promise that
    no dropout mask is saved, whatever the compiler and its cost model.
    """
    made: set[fx.Node] = set()
    for node in joint.nodes:
        if node.op != "call_function" or runs_once(node):
            continue
        if overload_packet(node) in known_ops().compute_intensive_ops:
            continue
        if all(source in made or _is_saveable_scalar(source) for source in node.all_input_nodes):
            made.add(node)
    return frozenset(made)
