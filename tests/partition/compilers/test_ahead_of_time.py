from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn import functional as F

import fuselayers.ops  # noqa: F401 (hands the fusion core its masks)
from fuselayers._torch.tracing import boxed
from fuselayers.partition import SavingRule, default
from fuselayers.partition.compilers.ahead_of_time import compile_ahead_of_time


class Graphs:
    """Runs graphs op by op, and keeps them."""

    def __init__(self) -> None:
        self.seen: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        self.seen.append(graph)
        return boxed(graph)


def compiled(fn: Callable[..., Tensor], runnable: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    given = {"compiler": "eager", "partition": "default", "torch_random": False, **options}

    def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return compile_ahead_of_time(graph, inputs, runnable=runnable, **given)

    torch.compiler.reset()
    return torch.compile(fn, backend=backend)


def calls(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_each_graph_is_made_runnable_once() -> None:
    graphs, x = Graphs(), torch.randn(4, requires_grad=True)
    fn = compiled(lambda x: x.sin().cos(), graphs)
    for _ in range(2):
        (got,) = torch.autograd.grad(fn(x).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(x.sin().cos().sum(), x)[0])
    assert len(graphs.seen) == 2
    with torch.no_grad():
        fn(x)
    assert len(graphs.seen) == 3


@pytest.mark.parametrize("compiler", ["eager", "nvfuser"])
def test_a_rule_is_told_for_whom_it_prices(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    original = SavingRule.__call__

    def spy(self: SavingRule, *args: Any, **options: Any) -> Any:
        told.append(options["compiler"])
        return original(self, *args, **options)

    monkeypatch.setattr(SavingRule, "__call__", spy)
    compiled(torch.sin, Graphs(), compiler=compiler)(torch.randn(4, requires_grad=True))
    assert told == [compiler]


def test_a_users_partitioner_keeps_the_signature_it_has() -> None:
    told = []

    def own(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, static_lifetime_input_indices: Any) -> Any:
        told.append(num_fwd_outputs)
        return default(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    compiled(torch.sin, Graphs(), partition=own)(torch.randn(4, requires_grad=True))
    assert told == [1]


@pytest.mark.parametrize("torch_random", [False, True])
def test_a_forward_alone_drops_what_one_with_a_backward_drops(torch_random: bool) -> None:
    fn = compiled(lambda x: F.dropout(x, 0.5) * 1, Graphs(), torch_random=torch_random)
    x = torch.ones(200)
    torch.manual_seed(4)
    alone = fn(x)
    torch.manual_seed(4)
    both = fn(x.requires_grad_())
    assert torch.equal(alone, both.detach())
    if torch_random:
        torch.manual_seed(4)
        assert torch.equal(alone, F.dropout(torch.ones(200), 0.5))


def test_decompositions_are_taken() -> None:
    x = torch.randn(4, requires_grad=True)
    names = []
    for table in (None, get_decompositions([torch.ops.aten.silu])):
        graphs = Graphs()
        compiled(F.silu, graphs, decompositions=table)(x)
        names.append(calls(graphs.seen[0]))
    assert "aten.silu.default" in names[0]
    assert "aten.silu.default" not in names[1]
