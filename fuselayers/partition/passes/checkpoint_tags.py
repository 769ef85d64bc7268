"""checkpoint_tags -- tag the values that must be saved, by the user's checkpointing and by the kind of op.

`torch.utils.checkpoint` sets `meta["recompute"]` of each node, a CheckpointPolicy. Partitioners obey MUST_SAVE,
MUST_RECOMPUTE and PREFER_RECOMPUTE, and turn PREFER_SAVE into a high price of recomputing.
"""

import torch
import torch.fx as fx

from ..._torch.tracing import CheckpointPolicy, must_recompute, placement
from ..node_kinds import is_collective
from .seeded_dropout import SEED_OP


def checkpoint_tags_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Tag as MUST_SAVE: collectives outside checkpointed regions, the source of an input's update, the values on the
    boundary of checkpointed regions, and the seeds in them. Only tags change."""
    nodes = list(graph_module.graph.nodes)
    for node in nodes:
        if must_recompute(node):
            # A seed has 8 bytes. To draw it again torch would save the generator's state, 5 KB on a CPU.
            if _ends_a_region(node) or node.target is SEED_OP:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif is_collective(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    _save_sources_of_updates(nodes)
    return graph_module


def _ends_a_region(node: fx.Node) -> bool:
    """True for the last value of a checkpointed region if another region or a gradient hook reads it."""
    users = [user for user in node.users if must_recompute(user)]
    region = node.meta.get("ac_graph_id")
    # Two adjacent regions: if their boundary were recomputed, the values of both would be alive at once.
    if region is not None and any(user.meta.get("ac_graph_id", region) > region for user in users):
        return True
    # A hook on a region's output (such as a sharded parameter's all-gather) runs before the region is recomputed and
    # needs the output's gradient, which may need the output: saving it breaks the cycle.
    return bool(node.meta.get("has_backward_hook")) and not users


def _save_sources_of_updates(nodes: list[fx.Node]) -> None:
    """If forward and backward both write to an input, save forward's new value, so that it does not depend on
    backward's."""
    copies = [node for node in nodes if node.target is torch.ops.aten.copy_.default]
    written_in_backward = {node.args[0] for node in copies if placement(node) == "must_be_in_backward"}
    for node in copies:
        if placement(node) == "must_be_in_forward" and node.args[0] in written_in_backward:
            source = node.args[1]
            if isinstance(source, fx.Node):
                source.meta["recompute"] = CheckpointPolicy.MUST_SAVE
