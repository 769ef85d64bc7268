import pytest
import torch
import torch.fx as fx

from fuselayers.partition.passes import unread_collectives_pass
from tests.partition.tracing import Hand, ops_of

pytest.importorskip("torch.distributed._functional_collectives")


def gathered(hand: Hand, x: fx.Node) -> fx.Node:
    ops = torch.ops._c10d_functional
    return hand.call(ops.wait_tensor.default, hand.call(ops.all_gather_into_tensor.default, x, 2, "0"))


def test_backward_does_not_repeat_a_collective_that_it_does_not_read() -> None:
    hand = Hand("x")
    forward = hand.module(gathered(hand, hand.call(torch.ops.aten.cos.default, *hand.inputs)))
    hand = Hand("x", "dy")
    x, dy = hand.inputs
    gathered(hand, hand.call(torch.ops.aten.cos.default, x))
    backward = hand.module(hand.call(torch.ops.aten.mul.Tensor, dy, 2))
    assert ops_of(unread_collectives_pass(backward, forward)) == ["mul"]


def test_collectives_that_are_read_or_only_in_backward_stay() -> None:
    hand = Hand("x")
    forward = hand.module(gathered(hand, *hand.inputs))
    hand = Hand("x", "dy")
    x, dy = hand.inputs
    again = gathered(hand, x)
    gathered(hand, dy)
    backward = unread_collectives_pass(hand.module(again), forward)
    assert ops_of(backward) == ["all_gather_into_tensor", "wait_tensor"] * 2
