"""torch_min_cut -- PyTorch's partitioner under a budget. Used by `benchmarks.partition` and the tests."""

import torch.fx as fx
from torch._functorch import config, partitioners


def torch_min_cut_at_budget(
    joint_module: fx.GraphModule, share: float, *, num_fwd_outputs: int, static_lifetime_input_indices: list[int]
) -> list[fx.Node]:
    """Return the values that PyTorch's partitioner saves under `activation_memory_budget=share`, 0 to 1."""
    info = partitioners.classify_nodes(joint_module, static_lifetime_input_indices, num_fwd_outputs)
    # The distance from backward, for its heuristics.
    for node in reversed(joint_module.graph.nodes):
        if node.op == "output" or info.is_required_fw(node):
            distances = [user.dist_from_bw + 1 for user in node.users if node.op != "output"]
            node.dist_from_bw = min([int(1e9), *distances])
        else:
            node.dist_from_bw = 0
    with config.patch(activation_memory_budget=share):
        chosen = partitioners.choose_saved_values_set(joint_module.graph, info, memory_budget=share)
    return list(chosen)
