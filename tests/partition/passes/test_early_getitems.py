import operator

import torch

from fuselayers.partition.passes import early_getitems_pass
from tests.partition.tracing import Hand, ops_of


def test_tuples_are_taken_apart_at_once_and_in_order() -> None:
    hand = Hand("x")
    pair = hand.call(torch.ops.aten.sort.default, *hand.inputs)
    sine = hand.call(torch.ops.aten.sin.default, *hand.inputs)
    second = hand.call(torch.ops.aten.sort.default, sine)
    values = hand.call(operator.getitem, pair, 0)
    late = hand.call(torch.ops.aten.cos.default, sine)
    indices = hand.call(operator.getitem, pair, 1)
    other = hand.call(operator.getitem, second, 0)
    module = hand.module(values, indices, other, late)
    argument = torch.randn(7)
    expected = module(argument)
    assert early_getitems_pass(module) is module
    assert ops_of(module) == ["sort", "getitem", "getitem", "sin", "sort", "getitem", "cos"]
    first, second = list(module.graph.nodes)[2:4]
    assert (first, second) == (values, indices)
    torch.testing.assert_close(module(argument), expected)
