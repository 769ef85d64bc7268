"""peak_bytes -- the most bytes that forward and backward hold at once, from their graphs."""

import operator
from typing import Any

import torch.fx as fx

from ..node_kinds import looks_at_its_input, num_bytes, writes
from ..passes import copied_bytes


def peak_bytes(forward: fx.GraphModule, backward: fx.GraphModule, *, num_forward_outputs: int) -> int:
    """Return the most bytes alive at once when forward and then backward run op by op.

    A value lives until its last reader has run; the forward's outputs and the gradients live until the end. Inputs,
    parameters and the incoming gradients do not count, since they are in memory anyway. Neither does the memory that an
    op uses inside, but for the copy of a factor that a product in oneDNN needs.
    """
    steps = [*forward.graph.nodes, *backward.graph.nodes]
    in_forward = {node.name: node for node in forward.graph.nodes}
    owner: dict[fx.Node, fx.Node] = {}  # for each value, the value that owns its memory
    last: dict[fx.Node, int] = {}  # for each owner, the step that reads it last
    for step, node in enumerate(steps):
        source = in_forward.get(node.name, node) if node.op == "placeholder" else node
        if looks_at_its_input(node) or writes(node):
            source = node.all_input_nodes[0]
        owner[node] = owner.get(source, node)
        for value in (node, *node.all_input_nodes):
            last[owner[value]] = step
    returned: Any = forward.graph.output_node().args[0]
    last |= {owner[value]: len(steps) for value in returned[:num_forward_outputs] if isinstance(value, fx.Node)}
    freed: list[int] = [0] * (len(steps) + 1)
    for value, step in last.items():
        freed[step] += _own_bytes(value)
    live = peak = 0
    for step, node in enumerate(steps):
        live += _own_bytes(node) if owner[node] is node else 0
        peak = max(peak, live + copied_bytes(node))
        live -= freed[step]
    return peak


def _own_bytes(node: fx.Node) -> int:
    # The elements of a tuple count where they are unpacked.
    unpacked = any(user.target is operator.getitem for user in node.users)
    return 0 if node.op in ("placeholder", "output") or unpacked else num_bytes(node)
