from typing import Any

import torch
import torch.fx as fx

from fuselayers.partition.passes import keep_mutated_inputs_pass
from tests.partition.tracing import called, ops_of

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


def test_readers_get_a_clone_of_what_is_overwritten() -> None:
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


def test_what_only_clones_read_has_one_already() -> None:
    module = keep_mutated_inputs_pass(graph_of(reads=(CLONE,)))
    assert called(module).count("aten.clone.default") == 1
    module = keep_mutated_inputs_pass(graph_of(reads=(CLONE, SINE)))
    assert called(module).count("aten.clone.default") == 2


def test_what_is_not_overwritten_is_left_alone() -> None:
    module = graph_of(reads=(SINE,), writes=False)
    before = str(module.graph)
    assert str(keep_mutated_inputs_pass(module).graph) == before


def test_what_nobody_reads_is_left_alone() -> None:
    assert "aten.clone.default" not in called(keep_mutated_inputs_pass(graph_of(reads=())))
