"""What saving a value costs and what computing it again costs, both in bytes moved to and from memory."""

from dataclasses import dataclass
from typing import Final

import torch.fx as fx

from .joint_graph import JointGraph, is_fusible, is_view, num_bytes
from .torch_private import is_opaque, is_sym_node

__all__ = ["CostModel"]

_SYMBOL_BYTES: Final = 8.0
# Smaller than any real difference: prefers inputs over intermediates, and fewer recomputed ops over more.
_TIE: Final = 1e-3
_ARITHMETIC: Final = 0.02


@dataclass(frozen=True)
class CostModel:
    """Prices of the cut.

    Args:
        fused: True for a compiler that fuses elementwise ops into their neighbours, where computing a value again next
            to its use moves no bytes; False for a graph run op by op, where it moves the op's input and its output.
        memory_price: what keeping one byte from forward to backward costs beyond moving it, in bytes moved. 0 looks at
            time only; at 0.5 an elementwise chain is computed again rather than kept even where its value is in memory
            anyway, and a matmul never is.
    """

    fused: bool = True
    memory_price: float = 0.5

    def saving(self, node: fx.Node, joint: JointGraph) -> float:
        """Cost of handing the value from forward to backward."""
        if is_sym_node(node):
            return _SYMBOL_BYTES
        if node in joint.static_inputs or is_opaque(node):
            return 0.0
        size = num_bytes(node)
        if node in joint.inputs:
            return size * (1.0 + self.memory_price) + 1.0
        # Note: [a value in memory anyway] One that a matmul made or reads is written by the forward in any case;
        # saving it costs backward's read. One that lives only inside a fused kernel costs a write as well.
        readers = [user for user in node.users if user in joint.forward]
        in_memory = not self.fused or not is_fusible(node) or not all(is_fusible(reader) for reader in readers)
        return size * ((1.0 if in_memory else 2.0) + self.memory_price + _TIE) + 1.0

    def recomputing(self, node: fx.Node, joint: JointGraph) -> float:
        """Cost of running the (recomputable) op again in backward, its inputs being there."""
        if is_view(node) or num_bytes(node) == 0:
            return 0.0
        size = num_bytes(node)
        if not self.fused:
            return 2.0 * size
        return size * (_ARITHMETIC + (1.0 if _feeds_unfused_backward(node, joint) else 0.0))


def _feeds_unfused_backward(node: fx.Node, joint: JointGraph) -> bool:
    """True if a matmul of backward reads the value, so that recomputing it means writing it to memory."""
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if is_view(user):
                stack.append(user)
            elif user not in joint.forward and not is_fusible(user):
                return True
    return False
