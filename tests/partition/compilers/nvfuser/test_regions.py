"""The regions of a graph, and the graph that is left around them."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fuselayers.partition.compilers.nvfuser.regions import extract, groups_of, rule_of
from tests.partition.compilers.nvfuser.interpreter import StandIn
from tests.partition.compilers.nvfuser.tracing import CPU, graph_of

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def names_of(group: Sequence[fx.Node]) -> list[str]:
    return [getattr(node.target, "overloadpacket", node.target).__name__ for node in group]


def groups(fn: Callable[..., Any], *inputs: Tensor) -> list[list[str]]:
    return [names_of(group) for group in groups_of(graph_of(fn, *inputs), CPU)]


def cut_out(fn: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The graph with each region as a call that runs it op by op, after a check of its values."""
    module = graph_of(fn, *inputs)
    expected = fn(*inputs)
    cut = extract(module, groups_of(module, CPU), as_call)
    torch.testing.assert_close(cut(*inputs), expected)
    return cut


def as_call(region: fx.GraphModule) -> Callable[..., Any]:
    def region_call(*values: Any) -> Any:
        return region(*values)

    return region_call


def outside(module: fx.GraphModule) -> list[str]:
    calls = [node for node in module.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    return [getattr(node.target, "overloadpacket", node.target).__name__ for node in calls]


X = torch.randn(4, 8)


def test_a_matmul_separates_two_regions() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x.sin().cos() @ w).exp().tanh()

    assert groups(fn, X, torch.randn(8, 8)) == [["sin", "cos"], ["exp", "tanh"]]
    assert outside(cut_out(fn, X, torch.randn(8, 8))) == ["region_call", "mm", "region_call"]


def test_ops_before_and_after_a_matmul_are_not_joined() -> None:
    """The matmul would have to run in the middle of the region, although the add also reads from before it."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        before = x.sin().cos()
        return ((before @ w) + before).exp()

    assert groups(fn, X, torch.randn(8, 8)) == [["sin", "cos"], ["add", "exp"]]
    cut_out(fn, X, torch.randn(8, 8))


def test_ops_that_the_matmul_does_not_connect_are_two_regions() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ w
        return product.exp().tanh(), x.sin().cos()

    assert sorted(groups(fn, X, torch.randn(8, 8))) == [["exp", "tanh"], ["sin", "cos"]]


def test_one_op_is_left_to_torch() -> None:
    assert groups(lambda x, w: x.sin() @ w, X, torch.randn(8, 8)) == []
    assert groups(lambda x: x.sin().t().unsqueeze(0), X) == []


def test_views_alone_are_left_to_torch() -> None:
    assert groups(lambda x: x.t().reshape(2, 16).unsqueeze(0).expand(3, 2, 16), X) == []


def test_views_at_the_front_are_made_by_torch() -> None:
    assert groups(lambda x: x.t().unsqueeze(0).sin().cos(), X) == [["sin", "cos"]]


def test_a_view_that_a_region_would_return_is_made_outside() -> None:
    """A region returns no views of its inputs or of its other results."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        looked = x.sin().cos().transpose(0, 1)
        return looked, looked.exp()

    assert groups(fn, X) == [["sin", "cos", "transpose", "exp"]]
    assert outside(cut_out(fn, X)) == ["region_call", "transpose"]


def test_a_constant_tensor_is_made_inside_and_outside() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        twos = torch.full((8,), 2.0)
        return x.sin() * twos, twos

    assert groups(fn, X) == [["full", "sin", "mul"]]
    assert outside(cut_out(fn, X)) == ["full", "region_call"]


def test_readers_of_one_large_tensor_are_one_region() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().cos(), (x * 2).sum(0)

    assert groups(fn, X) == [["sin", "cos", "mul", "sum"]]


def test_readers_of_a_small_tensor_stay_apart() -> None:
    def fn(x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (x * v).sin(), (y * v).sin()

    assert groups(fn, X, torch.randn(4, 8), torch.randn(8)) == [["mul", "sin"], ["mul", "sin"]]


def test_a_long_chain_grows_in_time(on_the_cpu: StandIn) -> None:
    """Eight times the nodes take about eight times as long, not sixty-four times."""

    def seconds(length: int) -> float:
        graph = fx.Graph()
        node = graph.placeholder("x")
        with FakeTensorMode():
            node.meta["val"] = torch.empty(4, 8)
        for _ in range(length):
            above, node = node, graph.call_function(torch.ops.aten.sin.default, (node,))
            node.meta["val"] = above.meta["val"]
        graph.output((node,))
        module = fx.GraphModule({}, graph)
        started = time.process_time()
        (group,) = groups_of(module, CPU)
        taken = time.process_time() - started
        assert [one.name for one in group] == [one.name for one in graph.nodes if one.op == "call_function"]
        return taken

    assert min(seconds(3200) for _ in range(2)) < 24 * min(seconds(400) for _ in range(5))


def test_the_rest_of_the_graph_keeps_its_order() -> None:
    """Mutations and random draws stay in their order."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        first = torch.bernoulli(y.sigmoid().tanh() * 0.5)
        second = torch.bernoulli(x.sigmoid() * 0.5)
        y.copy_(x.exp().cos() + first)
        return second

    module = graph_of(fn, X, torch.randn(4, 8))
    before = [node.name for node in module.graph.nodes if "bernoulli" in node.name or "copy_" in node.name]
    cut = extract(module, groups_of(module, CPU), as_call)
    assert [node.name for node in cut.graph.nodes if node.name in before] == before


@pytest.mark.parametrize(
    ("why", "fn", "inputs"),
    [
        ("complex numbers", lambda x: (x.sin() * 2).sin(), (torch.zeros(3, dtype=torch.complex64),)),
        ("a maximum of booleans", lambda x: x.maximum(x).maximum(x), (torch.zeros(3, dtype=torch.bool),)),
        ("bytes", lambda x: (x + 1) * 2, (torch.zeros(3, dtype=torch.uint8),)),
        ("more than eight dimensions", lambda x: x.sin().cos(), (torch.zeros(1, 1, 1, 1, 1, 1, 1, 1, 2),)),
        ("no elements", lambda x: x.sin().cos(), (torch.zeros(0, 3),)),
        ("another device", lambda x: x.sin().cos(), (torch.zeros(3, device="meta"),)),
        ("a sparse layout", lambda x: x.sin().asin(), (torch.eye(3).to_sparse(),)),
    ],
)
def test_an_unsupported_tensor_is_left_to_torch(why: str, fn: Any, inputs: tuple[Tensor, ...]) -> None:
    assert groups(fn, *inputs) == [], why


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + (x > 0),
        lambda x: torch.full_like(x, 2.0).sin() * 2,
        lambda x: (x.long() << 2) & 7,
        lambda x: x.logical_and(x > 1).logical_not(),
        lambda x: x[:, 1:5].sin()[1:].cos(),
        lambda x: (x.sin().sum() * x.mean()).exp(),
        lambda x: torch.nn.functional.pad(x.sin(), (1, 2)).cos(),
        lambda x: (x.long() * 3 + 1) ** 2 - x.long(),
    ],
)
def test_a_region_computes_what_its_ops_did(fn: Callable[..., Any]) -> None:
    cut_out(fn, X)


def test_an_op_with_unsupported_arguments_is_left_to_torch() -> None:
    module = graph_of(lambda x: torch.add(x, x, alpha=2).sin().clamp(max=x).cos(), X)
    rules = {names_of([node])[0]: rule_of(node, CPU) for node in module.graph.nodes if node.op == "call_function"}
    assert {name: rule is not None for name, rule in rules.items()} == {
        "add": False,
        "sin": True,
        "clamp": False,
        "cos": True,
    }
