import math
import random

import networkx as nx
import pytest
from networkx.algorithms.flow import boykov_kolmogorov, preflow_push

from fuselayers.partition.choose.flow import SINK, SOURCE, UnboundedCutError, minimum_cut


def random_graph(seed: int) -> nx.DiGraph:
    """A random graph with cycles, edges of capacity 0, and edges that cannot be cut."""
    number = random.Random(seed)
    graph = nx.DiGraph()
    nodes = [SOURCE, *range(number.randint(3, 20)), SINK]
    graph.add_nodes_from((SOURCE, SINK))
    for start in nodes[:-1]:
        for end in nodes[1:]:
            if start == end or (start, end) == (SOURCE, SINK) or number.random() >= 0.3:
                continue
            if number.random() < 0.15 and start != SOURCE:
                graph.add_edge(start, end)
            else:
                graph.add_edge(start, end, capacity=float(number.choice((0, 1, 2, 3, 5, 8, 13, 1 << 40))))
    return graph


@pytest.mark.parametrize("seed", range(60))
def test_value_is_minimal_and_the_cut_has_it(seed: int) -> None:
    graph = random_graph(seed)
    uncuttable = nx.DiGraph([(start, end) for start, end, data in graph.edges(data=True) if "capacity" not in data])
    uncuttable.add_nodes_from((SOURCE, SINK))
    assert not nx.has_path(uncuttable, SOURCE, SINK)
    edges = [(start, end, data.get("capacity", math.inf)) for start, end, data in graph.edges(data=True)]
    value, needed = minimum_cut(edges)
    for other in (preflow_push, boykov_kolmogorov):
        assert value == pytest.approx(nx.maximum_flow_value(graph, SOURCE, SINK, flow_func=other), rel=1e-9), other
    assert SINK in needed
    assert SOURCE not in needed
    crossing = sum(capacity for start, end, capacity in edges if start not in needed and end in needed)
    assert crossing == pytest.approx(value, rel=1e-9)


def test_of_equal_cuts_the_one_nearest_to_the_sink() -> None:
    assert minimum_cut([(SOURCE, "a", 2.0), ("a", "b", 2.0), ("b", SINK, 2.0)]) == (2.0, {SINK})


def test_uncuttable_path_is_named() -> None:
    free = [(SOURCE, "a"), ("a", "c"), ("c", SINK), ("b", SINK)]
    edges = [("a", "b", 1.0), *((start, end, math.inf) for start, end in free)]
    with pytest.raises(UnboundedCutError, match=r"^no finite cut: source -> a -> c -> sink$") as error:
        minimum_cut(edges)
    assert error.value.path == [SOURCE, "a", "c", SINK]


def test_a_long_chain_is_no_recursion() -> None:
    nodes = [SOURCE, *range(20_000), SINK]
    assert minimum_cut([*zip(nodes[:-2], nodes[1:-1], [4.0] * 20_000, strict=True), (nodes[-2], SINK, 3.0)])[0] == 3.0
