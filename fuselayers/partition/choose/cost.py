"""The price of saving a value and of recomputing it, both in bytes moved to and from memory.

    saving v         a read in backward, a write in forward if v is not in memory anyway, and memory_price per byte
    compressed v     a write and a read of the fewer bytes, and memory_price for them; a read in forward, and in
                     backward a write and a read if a matmul reads it
    recomputing v    fused:   its arithmetic; and a write and a read if a matmul of backward reads it
                     unfused: a launch, its inputs' reads, a write, the reader's read, its FLOPs

An op that a compiler fuses into its neighbours adds no reads or writes: each input is either saved, and its read is
part of that price, or recomputed in the same loop.

Note: [why a matmul is not recomputed at the default price] Its result is in memory anyway, so saving a byte of it costs
1 + memory_price = 2.5. Recomputing it writes and reads that byte, 2, reads the operands and takes the FLOPs. The sum is
above 2.5 unless the inner dimension is tiny; then recomputing is cheaper.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from ..._torch.dispatch import tree_map
from ..._torch.tracing import is_opaque, is_sym_node, overload_packet, size_hint
from ...hardware import Machine
from ..joint_graph import JointGraph
from ..node_kinds import (
    is_fusible,
    is_own_kernel,
    looks_at_its_input,
    num_bytes,
    num_elements,
    only_moves,
    prefers_save,
    readers_of,
    storage_of,
)

_SYMBOL_BYTES: Final = 8.0
# An elementwise op's arithmetic that memory traffic does not hide, in FLOPs per element read or written, whichever is
# more.
_FLOPS_PER_ELEMENT: Final = 0.4
# Smaller than any real difference: prefers inputs over intermediates, and fewer ops over more.
_TIE: Final = 1e-3
# Values that the user prefers to save, and ops of unknown cost (a custom op may be a whole solver), are recomputed only
# if nothing else fits.
_RELUCTANCE: Final = 100.0
# torch has no formula for the FLOPs of these ops; the formula of another kernel fits.
_ATTENTION: Final = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
)
_ATTENTION_BACKWARD: Final = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward,
)
# They read only the rows that they return.
_GATHERS: Final = frozenset({torch.ops.aten.embedding, torch.ops.aten.index_select})
# Ops of known cost, beside those with a FLOP formula. No compiler fuses them, and they read their input once or twice.
_PRICED: Final = frozenset(
    {
        *_ATTENTION,
        torch.ops.aten.native_layer_norm,
        torch.ops.aten._fused_rms_norm,
        torch.ops.aten._softmax,
        torch.ops.aten._log_softmax,
    }
)


@dataclass(frozen=True)
class NodePrice:
    """The terms of a price.

    Attributes:
        moved: bytes moved to and from memory; a launch counts as the bytes that could be moved in its time.
        arithmetic: the time of a matmul's FLOPs, as the bytes that could be moved in that time.
        saved: bytes saved for backward.
        reluctance: a factor on `moved` and `arithmetic`.
    """

    moved: float = 0.0
    arithmetic: float = 0.0
    saved: float = 0.0
    reluctance: float = 1.0


@dataclass(frozen=True)
class CostModel:
    """Prices of the cut.

    Args:
        machine: turns FLOPs and launches into bytes.
        fused: True for a compiler that fuses elementwise ops into their neighbours; False for a graph run op by op,
            where each op is a kernel.
        memory_price: the price of one saved byte, in bytes moved. 0 minimises time alone. At the default, saving a
            byte less is worth one byte written in backward, but not a byte written and read.
    """

    machine: Machine
    fused: bool = True
    memory_price: float = 1.5

    def __post_init__(self) -> None:
        if not 0 <= self.memory_price < math.inf:
            raise ValueError(
                "memory_price must be a finite number of bytes moved per byte saved, 0 or more, "
                f"got {self.memory_price}"
            )

    def total(self, price: NodePrice) -> float:
        """The price in bytes moved."""
        return price.reluctance * (price.moved + price.arithmetic) + self.memory_price * price.saved

    def saving(self, node: fx.Node, joint: JointGraph) -> NodePrice:
        """Return the price of handing the value from forward to backward."""
        if is_sym_node(node):
            return NodePrice(moved=_SYMBOL_BYTES)
        if is_opaque(node):
            return NodePrice()
        # A view keeps its whole storage alive.
        storage = storage_of(node)
        if storage in joint.static_inputs:
            return NodePrice()
        tie = _TIE * (1.0 if storage is node else 2.0)
        if node in joint.compressed:
            fewer, whole = float(joint.compressed[node]), float(num_bytes(node))
            restored = not self.fused or _has_unfused_reader(joint, node, forward=False)
            moved = 2.0 * fewer + whole * (1.0 + 2.0 * restored + tie)
            return NodePrice(moved=moved + 1.0, saved=fewer)
        size = float(num_bytes(storage))
        if storage in joint.inputs:
            return NodePrice(moved=size + 1.0, saved=size)
        # Outputs, and inputs and results of matmuls, are in memory anyway. A value inside a fused kernel would have to
        # be written.
        alone = self.fused and is_fusible(storage) and storage not in joint.returned
        in_memory = not alone or _has_unfused_reader(joint, storage, forward=True)
        reads_and_writes = (1.0 if in_memory else 2.0) + tie
        return NodePrice(moved=size * reads_and_writes + 1.0, saved=size)

    def recomputing(self, node: fx.Node, joint: JointGraph) -> NodePrice:
        """Return the price of recomputing the op in backward, without that of its inputs."""
        free = looks_at_its_input(node) or node.target is operator.getitem or node.op != "call_function"
        if free or num_bytes(node) == 0:
            return NodePrice()
        size = float(num_bytes(node))
        arithmetic = 0.0
        if self.fused and is_fusible(node):
            moved = self._arithmetic(node) + (2.0 * size if _has_unfused_reader(joint, node, forward=False) else 0.0)
        else:
            gathers = overload_packet(node) in _GATHERS
            reads = sum(
                min(num_bytes(source), size) if gathers else num_bytes(source) for source in node.all_input_nodes
            )
            itemsize = max(int(size) // max(num_elements(node), 1), 1)
            arithmetic = self.machine.bytes_of_flops(flops_of(node), itemsize=itemsize)
            moved = reads + 2.0 * size + self._arithmetic(node) + self.machine.bytes_of_kernel
        packet = overload_packet(node)
        priced = packet in _PRICED or packet in flop_registry
        known = is_fusible(node) or only_moves(node) or is_own_kernel(node) or priced
        reluctant = prefers_save(node) or not known
        return NodePrice(moved=moved, arithmetic=arithmetic, reluctance=_RELUCTANCE if reluctant else 1.0)

    def _arithmetic(self, node: fx.Node) -> float:
        elements = max(num_elements(node), *(num_elements(source) for source in node.all_input_nodes), 0)
        return elements * _FLOPS_PER_ELEMENT * self.machine.bandwidth / self.machine.vector_flop_rate


def _has_unfused_reader(joint: JointGraph, node: fx.Node, *, forward: bool) -> bool:
    """True if an unfused op of forward, or of backward, reads the value or a view: then it has to be in memory."""
    return any((user in joint.forward) == forward and not is_fusible(user) for user in readers_of(node))


def flops_of(node: fx.Node) -> float:
    """FLOPs of a matmul, a convolution or an attention, by torch's own formulas; 0 for every other op.

    Sizes that are still symbolic count with their hint.
    """
    packet = overload_packet(node)
    if packet in _ATTENTION:
        packet = torch.ops.aten._scaled_dot_product_efficient_attention
    if packet in _ATTENTION_BACKWARD:
        packet = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0

    def with_hints(argument: Any) -> Any:
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty([size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")

    arguments, named, out = tree_map(with_hints, (node.args, dict(node.kwargs), node.meta["val"]))
    if "scaled_dot_product" in str(packet):
        arguments = _with_every_head(arguments, 1 if str(packet).endswith("_backward") else 0)
    return float(formula(*arguments, **named, out_val=out))


def _with_every_head(arguments: Sequence[Any], first: int) -> list[Any]:
    """Return attention's arguments with grouped key and value heads repeated, since torch's formula needs as many key
    heads as query heads. Query, key and value begin at `first`."""
    query = arguments[first]
    grouped = [tensor.new_empty((*query.shape[:-2], *tensor.shape[-2:])) for tensor in arguments[first + 1 : first + 3]]
    return [*arguments[: first + 1], *grouped, *arguments[first + 3 :]]
