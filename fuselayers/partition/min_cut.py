"""min_cut -- the cheapest set of values to save, as a minimum cut between the forward's inputs and the backward.

Each node n of the joint graph becomes an edge n.in -> n.out whose capacity is the cost of saving n; cutting that edge
means saving n. An edge source -> n.in carries the cost of computing n again: for an input, a matmul or a random draw it
has no capacity limit, so n is saved or is not needed. Edges n.out -> user.in follow the data and cannot be cut. What
backward must have leads to the sink. The cheapest cut is the best trade of memory against time within the cost model.

Chen et al., "Training deep nets with sublinear memory cost", 2016, pose the problem; He, Yu, "Transcending
runtime-memory tradeoffs in checkpointing by being fusion aware", MLSys 2023, solve it as a cut.
"""

from collections.abc import Hashable
from typing import Any

import networkx as nx
import torch.fx as fx

from .cost import CostModel
from .flow import SINK, SOURCE, UnboundedCutError, minimum_cut
from .joint_graph import JointGraph, is_recomputable, is_saveable, is_view, made_from_scalars
from .torch_private import must_recompute

__all__ = ["flow_graph", "saved_by_min_cut"]


def saved_by_min_cut(joint: JointGraph, *, cost: CostModel) -> list[fx.Node]:
    """Return the values that the forward hands to the backward, in the order of the graph.

    Raises:
        ValueError: backward needs a value that can neither be saved nor computed again; the message names it.
    """
    try:
        _, needed = minimum_cut(flow_graph(joint, cost=cost))
    except UnboundedCutError as error:
        late = {node.name for node in joint.from_gradients}
        names = [name for name, side in error.path[1:-1] if side == "in" and name not in late]
        raise ValueError(
            f"backward needs {names[-1]!r}, which cannot be saved (it is neither a tensor nor a size), nor computed "
            f"again, since {names[0]!r} may run only once"
        ) from error
    return [node for node in joint.nodes if (node.name, "in") not in needed and (node.name, "out") in needed]


def flow_graph(joint: JointGraph, *, cost: CostModel) -> "nx.DiGraph[Hashable]":
    """Return the graph whose minimum cut is the set of saved values; each edge says in `reason` why it is there."""
    graph: nx.DiGraph[Hashable] = nx.DiGraph()
    scalars_only = made_from_scalars(joint)

    def add(start: Hashable, end: Hashable, reason: str, capacity: float | None = None) -> None:
        data: dict[str, Any] = {"reason": reason} if capacity is None else {"reason": reason, "capacity": capacity}
        graph.add_edge(start, end, **data)

    for node in joint.nodes:
        entry, leave = (node.name, "in"), (node.name, "out")
        if node in joint.from_gradients:
            add(entry, SINK, "depends on an incoming gradient")
            continue
        if node in joint.backward:
            add(leave, SINK, "is a gradient that backward returns")
        if must_recompute(node):
            add(entry, SINK, "the user's checkpoint policy says recompute")
        elif node.op == "placeholder" or node in joint.inputs:
            add(SOURCE, entry, "is an input of the forward")
        elif node in joint.forward:
            if not (is_recomputable(node) or is_view(node) or node in scalars_only):
                add(SOURCE, entry, "may run only once")
            elif (price := cost.recomputing(node, joint)) > 0:
                add(SOURCE, entry, "costs this to compute again", price)
        if is_saveable(node) and node not in scalars_only:
            add(entry, leave, "costs this to save", cost.saving(node, joint))
        else:
            add(entry, leave, "comes from scalars alone" if node in scalars_only else "is no tensor and no size")
        for user in node.users:
            if user.op != "output":
                add(leave, (user.name, "in"), "is read by")
    return graph
