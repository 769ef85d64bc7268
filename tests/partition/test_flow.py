import random

import networkx as nx
import pytest
from networkx.algorithms.flow import edmonds_karp

from fuselayers.partition.flow import SINK, SOURCE, UnboundedCutError, minimum_cut


def random_graph(seed: int) -> "nx.DiGraph":
    number = random.Random(seed)
    graph = nx.DiGraph()
    nodes = [SOURCE, *range(number.randint(3, 20)), SINK]
    for place, start in enumerate(nodes):
        for end in nodes[place + 1 :]:
            if (start, end) != (SOURCE, SINK) and number.random() < 0.4:
                graph.add_edge(start, end, capacity=float(number.randint(1, 20)))
    graph.add_nodes_from((SOURCE, SINK))
    return graph


@pytest.mark.parametrize("seed", range(30))
def test_value_is_minimal_and_the_cut_has_it(seed: int) -> None:
    graph = random_graph(seed)
    value, needed = minimum_cut(graph)
    assert value == nx.maximum_flow_value(graph, SOURCE, SINK, flow_func=edmonds_karp)
    crossing = sum(data["capacity"] for a, b, data in graph.edges(data=True) if a not in needed and b in needed)
    assert crossing == value
    assert SINK in needed
    assert SOURCE not in needed


def test_uncuttable_path_is_named() -> None:
    graph = nx.DiGraph()
    graph.add_edge(SOURCE, "a")
    graph.add_edge("a", "b", capacity=1.0)
    graph.add_edge("a", "c")
    graph.add_edge("c", SINK)
    graph.add_edge("b", SINK)
    with pytest.raises(UnboundedCutError, match=r"^no finite cut: source -> a -> c -> sink$") as error:
        minimum_cut(graph)
    assert error.value.path == [SOURCE, "a", "c", SINK]


def test_nothing_to_cut() -> None:
    graph = nx.DiGraph()
    graph.add_edge(SOURCE, "a", capacity=1.0)
    assert minimum_cut(graph) == (0.0, frozenset())
