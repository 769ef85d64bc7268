"""Minimum cut of a directed graph by Dinic's algorithm, on flat lists, without torch.

Dinic, "Algorithm for solution of a problem of maximum flow in a network with power estimation", 1970. On the graph of a
48-layer GPT (14,000 nodes) networkx's preflow-push takes 1.1 s, its Boykov-Kolmogorov 0.8 s, and its dinitz 86 s; the
tests use the first two as oracles.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

SOURCE: Final = "source"
SINK: Final = "sink"


class UnboundedCutError(ValueError):
    """No finite cut exists. `path` leads from the source to the sink over edges that cannot be cut."""

    def __init__(self, path: list[Any]) -> None:
        super().__init__(f"no finite cut: {' -> '.join(map(str, path))}")
        self.path = path


def minimum_cut(edges: Iterable[tuple[Hashable, Hashable, float]]) -> tuple[float, frozenset[Hashable]]:
    """Return the value of the cheapest cut between SOURCE and SINK, and the nodes on the sink's side.

    If several cuts are cheapest, the one nearest to the sink is returned.

    Args:
        edges: start, end and capacity of each edge. The capacity is the cost of cutting it, infinity if it cannot be
            cut.

    Raises:
        UnboundedCutError: a path of uncuttable edges leads from SOURCE to SINK.

    >>> minimum_cut([(SOURCE, "x", 3.0), ("x", SINK, 2.0)])
    (2.0, frozenset({'sink'}))
    """
    number: dict[Hashable, int] = {SOURCE: 0, SINK: 1}
    # An edge has the index 2i and its reverse 2i + 1, so that `edge ^ 1` is the reverse.
    adjacent: list[list[int]] = [[], []]
    target: list[int] = []
    residual: list[float] = []
    for start_name, end_name, capacity in edges:
        if capacity <= 0:
            continue
        start, end = (number.setdefault(name, len(number)) for name in (start_name, end_name))
        adjacent += ([] for _ in range(len(number) - len(adjacent)))
        adjacent[start].append(len(target))
        adjacent[end].append(len(target) + 1)
        target += (end, start)
        residual += (capacity, 0.0)
    names = list(number)
    flow = 0.0
    while True:
        distance = _distances_to_sink(adjacent, target, residual)
        if distance[0] < 0:
            return flow, frozenset(name for name, steps in zip(names, distance, strict=True) if steps >= 0)
        flow += _blocking_flow(names, adjacent, target, residual, distance)


def _distances_to_sink(adjacent: list[list[int]], target: list[int], residual: list[float]) -> list[int]:
    """Steps from each node to the sink over edges that still have capacity; -1 where there is no way."""
    # Searching from the sink leaves out dead ends, which a search from the source would walk into again and again.
    distance = [-1] * len(adjacent)
    distance[1] = 0
    queue = [1]
    for node in queue:
        steps = distance[node] + 1
        for edge in adjacent[node]:
            neighbour = target[edge]
            if distance[neighbour] < 0 and residual[edge ^ 1] > 0:
                distance[neighbour] = steps
                queue.append(neighbour)
    return distance


def _blocking_flow(
    names: Sequence[Hashable],
    adjacent: list[list[int]],
    target: list[int],
    residual: list[float],
    distance: list[int],
) -> float:
    """Push flow along shortest paths until each has a full edge; return how much."""
    flow = 0.0
    following = [0] * len(adjacent)  # for each node, the edge to try next; earlier edges are dead ends
    nodes = [0]
    path: list[int] = []
    while nodes:
        node = nodes[-1]
        if node == 1:
            amount = min(residual[edge] for edge in path)
            if amount == math.inf:
                raise UnboundedCutError([names[passed] for passed in nodes])
            flow += amount
            full = -1
            for index in range(len(path) - 1, -1, -1):
                edge = path[index]
                residual[edge] -= amount
                residual[edge ^ 1] += amount
                if residual[edge] <= 0:
                    full = index
            del path[full:]
            del nodes[full + 1 :]
            continue
        edges = adjacent[node]
        wanted = distance[node] - 1
        index = following[node]
        while index < len(edges) and not (residual[edges[index]] > 0 and distance[target[edges[index]]] == wanted):
            index += 1
        following[node] = index
        if index < len(edges):
            path.append(edges[index])
            nodes.append(target[edges[index]])
        else:
            distance[node] = -1
            nodes.pop()
            if path:
                path.pop()
                following[nodes[-1]] += 1
    return flow
