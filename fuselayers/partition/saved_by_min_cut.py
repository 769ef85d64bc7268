"""saved_by_min_cut -- the cheapest set of values to save, as a minimum cut between forward's inputs and backward.

Each node n of the joint graph becomes an edge n.in -> n.out whose capacity is the cost of saving n; cutting that edge
means saving n. An edge source -> n.in carries the cost of recomputing n: for an input or a random draw it has no
capacity limit, so n is saved or is not needed. Edges n.out -> user.in follow the data and cannot be cut. Values that
backward needs lead to the sink. The cheapest cut is the best trade of memory against time in the cost model.

Chen et al., "Training deep nets with sublinear memory cost", 2016, pose the problem; He, Yu, "Transcending
runtime-memory tradeoffs in checkpointing by being fusion aware", MLSys 2023, solve it as a cut.
"""

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch.fx as fx

from .._torch.tracing import must_recompute
from .cost import CostModel, NodePrice
from .flow import SINK, SOURCE, UnboundedCutError, minimum_cut
from .joint_graph import JointGraph, PartitionError
from .node_kinds import source_line, why_runs_once

if TYPE_CHECKING:
    import networkx as nx


def saved_by_min_cut(joint: JointGraph, *, cost: CostModel) -> list[fx.Node]:
    """Return the values that the forward hands to the backward, in the order of the graph.

    Raises:
        PartitionError: backward needs a value that can neither be saved nor recomputed; the message names it, the
            reasons, and the source lines.
    """
    try:
        _, needed = minimum_cut(flow_graph(joint, cost=cost))
    except UnboundedCutError as error:
        raise _no_way(joint, error) from error
    return [node for node in joint.needed if (node.name, "in") not in needed and (node.name, "out") in needed]


def flow_graph(joint: JointGraph, *, cost: CostModel) -> "nx.DiGraph[Hashable]":
    """Return the graph whose minimum cut is the set of saved values.

    An edge that can be cut has a `capacity`, the cost in bytes moved, and a `price`, the NodePrice with its terms.
    """
    import networkx as nx

    graph: nx.DiGraph[Hashable] = nx.DiGraph()
    candidates = set(joint.needed)

    def add_priced(start: Hashable, end: Hashable, price: NodePrice) -> None:
        graph.add_edge(start, end, price=price, capacity=cost.total(price))

    for node in joint.needed:
        entry, leave = (node.name, "in"), (node.name, "out")
        if must_recompute(node) or not joint.runs_in_forward(node):
            graph.add_edge(entry, SINK)
        elif why_runs_once(node) is not None:
            graph.add_edge(SOURCE, entry)
        elif node not in joint.made_from_scalars:
            price = cost.recomputing(node, joint)
            if cost.total(price) > 0:
                add_priced(SOURCE, entry, price)
        if node in joint.made_from_scalars or joint.why_not_saveable(node) is not None:
            graph.add_edge(entry, leave)
        else:
            add_priced(entry, leave, cost.saving(node, joint))
        if node in joint.backward or any(user in joint.from_gradients for user in node.users):
            graph.add_edge(leave, SINK)
        graph.add_edges_from((leave, (user.name, "in")) for user in node.users if user in candidates)
    return graph


def _no_way(joint: JointGraph, error: UnboundedCutError) -> PartitionError:
    """The error for an uncuttable path: it names the last value on the path, which cannot be saved."""
    node_of = {node.name: node for node in joint.needed}
    on_path = list(dict.fromkeys(node_of[step[0]] for step in error.path[1:-1]))
    # If the path ends at a value's input side, the problem is the value that it is computed from.
    reader = on_path.pop() if error.path[-2][1] == "in" else None
    first, last = on_path[0], on_path[-1]
    needs = f"to compute {_named(reader)}, backward needs" if reader is not None else "backward needs"
    said = "it" if first is last else f"{_named(first)}, which it is computed from,"
    return PartitionError(
        f"{needs} {_named(last)}, which cannot be saved, since {joint.why_not_saveable(last)}, nor recomputed, "
        f"since {said} may run only once: {why_runs_once(first)}. Return it from the function as a tensor, or take it "
        f"out of the fused function"
    )


def _named(node: fx.Node) -> str:
    line = source_line(node)
    return f"{node.name!r} ({line})" if line else repr(node.name)
