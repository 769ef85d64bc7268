import operator

import torch
import torch.fx as fx

from fuselayers.partition.passes import early_getitems_pass
from tests.partition.tracing import ops_of


def test_tuples_are_taken_apart_at_once_and_in_order() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(torch.ops.aten.sort.default, (x,))
    sine = graph.call_function(torch.ops.aten.sin.default, (x,))
    second = graph.call_function(torch.ops.aten.sort.default, (sine,))
    values = graph.call_function(operator.getitem, (pair, 0))
    late = graph.call_function(torch.ops.aten.cos.default, (sine,))
    indices = graph.call_function(operator.getitem, (pair, 1))
    other = graph.call_function(operator.getitem, (second, 0))
    graph.output((values, indices, other, late))
    module = fx.GraphModule({}, graph)
    argument = torch.randn(7)
    expected = module(argument)
    assert early_getitems_pass(module) is module
    assert ops_of(module) == ["sort", "getitem", "getitem", "sin", "sort", "getitem", "cos"]
    first, second = list(module.graph.nodes)[2:4]
    assert (first, second) == (values, indices)
    torch.testing.assert_close(module(argument), expected)
