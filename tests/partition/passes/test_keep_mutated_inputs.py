from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from fuselayers.partition import fuse
from fuselayers.partition.passes import keep_mutated_inputs_pass
from tests.partition.tracing import ops_of

SINE, CLONE, COPY = torch.ops.aten.sin.default, torch.ops.aten.clone.default, torch.ops.aten.copy_.default


def graph_of(*, reads: tuple[Any, ...], writes: bool = True) -> fx.GraphModule:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for node in (x, y):
        node.meta["val"] = torch.ones(3)
    outputs = [graph.call_function(read, (x,)) for read in reads]
    if writes:
        graph.call_function(COPY, (x, y))
    graph.output((*outputs, x))
    return fx.GraphModule({}, graph)


def test_readers_get_a_clone_of_an_overwritten_input() -> None:
    module = keep_mutated_inputs_pass(graph_of(reads=(SINE, SINE)))
    assert ops_of(module) == ["clone", "sin", "sin", "copy_"]
    clone = module.graph.find_nodes(op="call_function", target=CLONE)[0]
    assert clone.meta["partitioner_tag"] == "is_forward"
    assert [user.target for user in clone.users] == [SINE, SINE]  # neither the write nor the output
    x = torch.full((3,), 2.0)
    sine, again, returned = module(x, torch.zeros(3))
    torch.testing.assert_close(sine, torch.full((3,), 2.0).sin())
    assert torch.equal(sine, again)
    assert returned is x
    assert torch.equal(x, torch.zeros(3))


class WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.buffer.mul_(2.0)
        return dy * ctx.saved_tensors[0].cos(), None


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("in_forward_too", [False, True])
def test_a_buffer_that_backward_writes_to_is_written_to(partition: str, in_forward_too: bool) -> None:
    def step(x: Tensor, buffer: Tensor) -> Tensor:
        if in_forward_too:
            buffer.add_(1.0)
        return WritesInBackward.apply(x * 2, buffer) * buffer.detach()

    seen = []
    for fn in (step, fuse(step, backend="eager", partition=partition, fallback=())):
        x, buffer = torch.linspace(0, 1, 4).requires_grad_(), torch.ones(4)
        fn(x, buffer).sum().backward()
        seen.append((x.grad, buffer))
    torch.testing.assert_close(seen[1], seen[0])
    assert torch.equal(seen[1][1], torch.full((4,), 4.0 if in_forward_too else 2.0))
