"""saved_by_default -- save what eager autograd would save, each tensor once."""

import torch.fx as fx

from ..._torch.tracing import CheckpointPolicy, must_recompute
from ..joint_graph import JointGraph, PartitionError
from ..node_kinds import is_fusible, is_view, num_bytes, storage_of


def saved_by_default(joint: JointGraph) -> list[fx.Node]:
    """Return every value of the forward that backward reads, with views replaced by their base.

    Backward recomputes only views, tensors made from scalars alone (dropout masks), values that the user's checkpoint
    policy recomputes, and values that only backward needs and that are larger than their sources. If backward needs
    only a tensor's size, the size is saved.

    Raises:
        PartitionError: backward needs an input that cannot be saved.
    """
    wanted = set(joint.read_by_backward)
    saved: list[fx.Node] = []
    for node in reversed(joint.needed):
        if node not in wanted:
            continue
        # A view that the user's checkpointing saves may have a base that is recomputed.
        view = is_view(node) and node.meta.get("recompute") is not CheckpointPolicy.MUST_SAVE
        recompute = view or node in joint.made_from_scalars or must_recompute(node) or _has_smaller_sources(joint, node)
        unsaveable = joint.why_not_saveable(node)
        if unsaveable is not None and node.op == "placeholder":
            raise PartitionError(f"backward needs the input {node.name!r}, which cannot be saved, since {unsaveable}")
        if recompute or not joint.runs_in_forward(node) or unsaveable is not None:
            wanted.update(node.all_input_nodes)
        else:
            saved.append(node)
    return saved[::-1]


def _has_smaller_sources(joint: JointGraph, node: fx.Node) -> bool:
    """True for a value of backward alone that is larger than its sources.

    Inductor makes the gradient of a cross entropy a one-hot mask [N, V] of the targets [N]: 51 MB for 1,024 tokens of
    GPT-2, which eager never keeps.
    """
    sources = {storage_of(source) for source in node.all_input_nodes}
    return node not in joint.forward and is_fusible(node) and sum(map(num_bytes, sources)) < num_bytes(node)
