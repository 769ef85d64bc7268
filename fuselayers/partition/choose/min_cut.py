"""saved_by_min_cut -- the cheapest set of values to save, as a minimum cut between forward's inputs and backward.

Each node n of the joint graph becomes an edge n.in -> n.out whose capacity is the cost of saving n; cutting that edge
means saving n. An edge source -> n.in has the cost of recomputing n as its capacity. For an input or a random draw that
edge cannot be cut, so n is saved or is not needed. Edges n.out -> user.in follow the data and cannot be cut. Values
that backward needs lead to the sink. The cheapest cut is the best trade of memory against time in the cost model.

Chen et al., "Training deep nets with sublinear memory cost", 2016, pose the problem; He, Yu, "Transcending
runtime-memory tradeoffs in checkpointing by being fusion aware", MLSys 2023, solve it as a cut.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch.fx as fx

from ..._torch.tracing import must_recompute
from ..joint_graph import JointGraph, PartitionError
from ..node_kinds import source_line, why_runs_once
from .cost import CostModel, NodePrice
from .flow import SINK, SOURCE, UnboundedCutError, minimum_cut


class PricedEdge(NamedTuple):
    """An edge of the graph to cut.

    Attributes:
        start: SOURCE, or the name and the side of a node.
        end: SINK, or the name and the side of a node.
        price: the price of recomputing `node` if the edge starts at SOURCE, else of saving it. None if the edge cannot
            be cut.
        node: the node that is recomputed or saved if the edge is cut.
    """

    start: Hashable
    end: Hashable
    price: NodePrice | None = None
    node: fx.Node | None = None


def saved_by_min_cut(joint: JointGraph, *, cost: CostModel) -> list[fx.Node]:
    """Return the values that forward saves for backward, in the order of the graph.

    Raises:
        PartitionError: backward needs a value that can neither be saved nor recomputed; the message names it, the
            reasons, and the source lines.
    """
    return saved_by_edges(joint, priced_edges(joint, cost=cost), lambda edge, price: cost.total(price))


def saved_by_edges(
    joint: JointGraph, edges: Sequence[PricedEdge], capacity_of: Callable[[PricedEdge, NodePrice], float]
) -> list[fx.Node]:
    """Return the values that the cheapest cut saves. `capacity_of` gives the capacity of each edge with a price.

    Raises:
        PartitionError: as `saved_by_min_cut`.
    """
    try:
        _, needed = minimum_cut(
            (edge.start, edge.end, math.inf if edge.price is None else capacity_of(edge, edge.price)) for edge in edges
        )
    except UnboundedCutError as error:
        raise _no_way(joint, error) from error
    return [node for node in joint.needed if (node.name, "in") not in needed and (node.name, "out") in needed]


def priced_edges(joint: JointGraph, *, cost: CostModel) -> list[PricedEdge]:
    """Return the graph whose minimum cut is the set of saved values."""
    edges: list[PricedEdge] = []
    candidates = set(joint.needed)
    for node in joint.needed:
        entry, leave = (node.name, "in"), (node.name, "out")
        if must_recompute(node) or not joint.runs_in_forward(node):
            edges.append(PricedEdge(entry, SINK))
        elif why_runs_once(node) is not None:
            edges.append(PricedEdge(SOURCE, entry))
        elif node not in joint.made_from_scalars:
            edges.append(PricedEdge(SOURCE, entry, cost.recomputing(node, joint), node))
        if node in joint.made_from_scalars or joint.why_not_saveable(node) is not None:
            edges.append(PricedEdge(entry, leave))
        else:
            edges.append(PricedEdge(entry, leave, cost.saving(node, joint), node))
        if node in joint.backward or any(user in joint.from_gradients for user in node.users):
            edges.append(PricedEdge(leave, SINK))
        edges += [PricedEdge(leave, (user.name, "in")) for user in node.users if user in candidates]
    return edges


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
