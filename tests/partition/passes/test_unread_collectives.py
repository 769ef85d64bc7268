import pytest
import torch
import torch.fx as fx

from fuselayers.partition.passes import unread_collectives_pass
from tests.partition.tracing import ops_of

pytest.importorskip("torch.distributed._functional_collectives")


def gathered(graph: fx.Graph, x: fx.Node) -> fx.Node:
    ops = torch.ops._c10d_functional
    return graph.call_function(
        ops.wait_tensor.default, (graph.call_function(ops.all_gather_into_tensor.default, (x, 2, "0")),)
    )


def module_of(graph: fx.Graph, *results: fx.Node) -> fx.GraphModule:
    graph.output(results)
    return fx.GraphModule({}, graph)


def test_backward_does_not_repeat_a_collective_that_it_does_not_read() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    forward = module_of(graph, gathered(graph, graph.call_function(torch.ops.aten.cos.default, (x,))))
    graph = fx.Graph()
    x, dy = graph.placeholder("x"), graph.placeholder("dy")
    gathered(graph, graph.call_function(torch.ops.aten.cos.default, (x,)))
    backward = module_of(graph, graph.call_function(torch.ops.aten.mul.Tensor, (dy, 2)))
    assert ops_of(unread_collectives_pass(backward, forward)) == ["mul"]


def test_collectives_that_are_read_or_only_in_backward_stay() -> None:
    graph = fx.Graph()
    forward = module_of(graph, gathered(graph, graph.placeholder("x")))
    graph = fx.Graph()
    x, dy = graph.placeholder("x"), graph.placeholder("dy")
    again = gathered(graph, x)
    gathered(graph, dy)
    backward = unread_collectives_pass(module_of(graph, again), forward)
    assert ops_of(backward) == ["all_gather_into_tensor", "wait_tensor"] * 2
