"""peak_bytes -- the most bytes that forward and backward hold at once, from their graphs."""

import operator
from typing import Any, Final

import torch.fx as fx

from .node_kinds import is_fusible, looks_at_its_input, num_bytes, writes

# Inductor writes a value to memory that is computed from more values than this; the second if it has several readers.
_MOST_READS: Final = (8, 4)


def peak_bytes(
    forward: fx.GraphModule, backward: fx.GraphModule, *, num_forward_outputs: int, fused: bool = False
) -> int:
    """Return the most bytes alive at once in forward and then backward, each value until its last reader.

    The ops run in the order of the graphs. The forward's outputs and the gradients live until the end. Inputs,
    parameters and the incoming gradients do not count, since they are in memory anyway, nor does the memory that an op
    uses inside.

    Args:
        fused: whether a compiler fuses elementwise ops. What only such ops read then takes no memory, and what they
            read lives until the end of their kernel.
    """
    steps = [*forward.graph.nodes, *backward.graph.nodes]
    in_forward = {node.name: node for node in forward.graph.nodes}
    owner: dict[fx.Node, fx.Node] = {}  # of each value: the one whose memory it is in
    inside: dict[fx.Node, set[fx.Node]] = {}  # of each owner without memory: those that its kernel reads
    last: dict[fx.Node, int] = {}  # of each owner: the step that reads it last
    for step, node in enumerate(steps):
        source = in_forward.get(node.name, node) if node.op == "placeholder" else node
        if looks_at_its_input(node) or writes(node):
            source = node.all_input_nodes[0]
        owner[node] = owner.get(source, node)
        reads = set[fx.Node]().union(*(inside.get(owner[value], {owner[value]}) for value in node.all_input_nodes))
        if (
            fused
            and owner[node] is node
            and len(reads) <= _MOST_READS[len(node.users) > 1]
            and _stays_in_a_kernel(node)
        ):
            inside[node] = reads
        elif owner[node] not in inside:
            last |= dict.fromkeys((owner[node], *reads), step)
    returned: Any = forward.graph.output_node().args[0]
    last |= {owner[value]: len(steps) for value in returned[:num_forward_outputs] if isinstance(value, fx.Node)}
    freed: list[int] = [0] * (len(steps) + 1)
    for value, step in last.items():
        freed[step] += _own_bytes(value)
    live = peak = 0
    for step, node in enumerate(steps):
        live += _own_bytes(node) if owner[node] is node and node not in inside else 0
        peak = max(peak, live)
        live -= freed[step]
    return peak


def _stays_in_a_kernel(node: fx.Node) -> bool:
    """True if only ops that a compiler fuses read the value, as it is or as a view."""
    readers = [*node.users]
    for reader in readers:
        if looks_at_its_input(reader):
            readers += reader.users
        elif not is_fusible(reader):
            return False
    return is_fusible(node)


def _own_bytes(node: fx.Node) -> int:
    # The elements of a tuple count where they are unpacked.
    unpacked = any(user.target is operator.getitem for user in node.users)
    return 0 if node.op in ("placeholder", "output") or unpacked else num_bytes(node)
