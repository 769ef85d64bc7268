"""one_permutation -- let all draws of seeds read the same empty permutation."""

import torch
import torch.fx as fx

from ..._torch.tracing import recompiled
from .seeded_dropout import SEED_OP


def one_permutation_pass(forward: fx.GraphModule) -> fx.GraphModule:
    """Let each draw of a seed read the permutation of the first draw, and remove the other permutations.

    Before the cut each draw needs a separate permutation, or torch's partitioner would merge the draws, see `ops.draw`.
    After the cut nothing merges them. On a GPU each permutation takes a kernel, which fills a scalar: two for each
    block of a GPT.
    """
    graph = forward.graph
    draws = graph.find_nodes(op="call_function", target=SEED_OP)
    made_for_draws = [draw for draw in draws if draw.args[0].target is torch.ops.aten.randperm.default]
    for draw in made_for_draws[1:]:
        permutation = draw.args[0]
        draw.args = made_for_draws[0].args
        if not permutation.users:
            graph.erase_node(permutation)
    return recompiled(forward)
