import math
import operator
import weakref
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fuselayers.partition.compilers.straight_line import straight_line
from tests.partition.tracing import split_of

ATEN = torch.ops.aten


def module_of(*outputs: Any, graph: fx.Graph, root: Any = None) -> fx.GraphModule:
    graph.output(outputs)
    return fx.GraphModule(root or {}, graph)


def test_same_results_as_the_graph_module() -> None:
    def layer(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        hidden = torch.nn.functional.layer_norm(x @ weight, (8,)).softmax(-1)
        values, places = hidden.sort(dim=-1, descending=True)
        return values.view(-1)[2:9:3], places.t(), list(torch.cat([hidden, x], 1).chunk(3, dim=1))

    x, weight = torch.randn(5, 8), torch.randn(8, 8)
    module = make_fx(layer)(x, weight)
    got, expected = straight_line(module)([x, weight]), module(x, weight)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert len(got[2]) == 3
    assert all(map(torch.equal, got[2], expected[2]))


def test_a_backward_of_a_model_gives_the_same_results() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.gelu(self.up(x)).square()

    _, backward = split_of(Layer(), torch.randn(4, 8, requires_grad=True), partition="min_cut")
    values = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
    arguments = [torch.randn(value.shape) for value in values]
    got, expected = straight_line(backward)(list(arguments)), backward(*arguments)
    assert len(got) == len(expected) == 3
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


class TestMemory:
    def test_the_list_of_arguments_is_emptied_before_the_first_op(self) -> None:
        graph = fx.Graph()
        x, unread = graph.placeholder("x"), graph.placeholder("unread")
        assert not unread.users
        seen: list[Any] = []
        arguments: list[Any] = [torch.ones(2), torch.ones(2)]
        unread_reference = weakref.ref(arguments[1])

        def look(value: Tensor) -> Tensor:
            seen.append((len(arguments), unread_reference()))
            return value + 1

        out = graph.call_function(look, (x,))
        (got,) = straight_line(module_of(out, graph=graph))(arguments)
        assert torch.equal(got, torch.full((2,), 2.0))
        assert seen == [(0, None)]

    def test_each_value_is_dropped_after_its_last_use(self) -> None:
        references: list[weakref.ref[Tensor]] = []
        alive: list[list[bool]] = []

        def make(value: Tensor) -> Tensor:
            made = value + 1
            references.append(weakref.ref(made))
            alive.append([reference() is not None for reference in references])
            return made

        graph = fx.Graph()
        x = graph.placeholder("x")
        first = graph.call_function(make, (x,))
        second = graph.call_function(make, (first,))
        third = graph.call_function(make, (second,))
        total = graph.call_function(operator.add, (third, first))
        last = graph.call_function(make, (total,))
        straight_line(module_of(last, graph=graph))([torch.ones(2)])
        # Second goes as soon as third is there, first lives on until the sum, and then only the last is left.
        assert alive == [[True], [True, True], [True, True, True], [False, False, False, True]]

    def test_what_nobody_reads_is_not_kept(self) -> None:
        references: list[weakref.ref[Tensor]] = []

        def make(value: Tensor) -> Tensor:
            made = value + 1
            references.append(weakref.ref(made))
            return made

        def look(value: Tensor) -> bool:
            return references[0]() is None

        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.call_function(make, (x,))
        assert straight_line(module_of(graph.call_function(look, (x,)), graph=graph))([torch.ones(2)]) == (True,)

    def test_is_called_as_aot_autograd_wants_it(self) -> None:
        graph = fx.Graph()
        assert straight_line(module_of(graph.placeholder("x"), graph=graph))._boxed_call is True  # type: ignore[attr-defined]


class TestConstants:
    def run(self, target: Any, *arguments: Any, **named: Any) -> Any:
        graph = fx.Graph()
        x = graph.placeholder("x")
        arguments = tuple(x if argument is ... else argument for argument in arguments)
        out = graph.call_function(target, arguments, named)
        (got,) = straight_line(module_of(out, graph=graph))([torch.arange(6.0)])
        return got

    def test_numbers_without_a_literal(self) -> None:
        assert self.run(ATEN.full.default, [2], math.inf).tolist() == [math.inf] * 2
        assert self.run(ATEN.full.default, [2], -math.inf).tolist() == [-math.inf] * 2
        assert self.run(ATEN.full.default, [1], math.nan).isnan().all()
        assert self.run(ATEN.mul.Tensor, ..., 1e-45)[1] != 0

    def test_names_that_exist_only_somewhere(self) -> None:
        got = self.run(
            ATEN.zeros.default,
            [2],
            dtype=torch.float64,
            device=torch.device("cpu"),
            layout=torch.strided,
            pin_memory=None,
        )
        assert got.dtype is torch.float64
        assert self.run(
            ATEN._to_copy.default, ..., dtype=torch.bfloat16, memory_format=torch.contiguous_format
        ).dtype is (torch.bfloat16)

    def test_slices_lists_and_keywords(self) -> None:
        assert self.run(operator.getitem, ..., slice(1, None, 2)).tolist() == [1.0, 3.0, 5.0]
        assert self.run(operator.getitem, ..., (slice(None), None)).shape == (6, 1)
        assert self.run(lambda x, nested: nested, ..., [[1, [2.5]], (3,), {"a": None, "b": [True]}]) == (
            [[1, [2.5]], (3,), {"a": None, "b": [True]}]
        )
        assert self.run(lambda x, *, flag, text: (x.sum().item(), flag, text), ..., flag=False, text="it's \n") == (
            15.0,
            False,
            "it's \n",
        )

    def test_nodes_inside_of_lists_dicts_and_slices(self) -> None:
        graph = fx.Graph()
        x, place = graph.placeholder("x"), graph.placeholder("place")
        both = graph.call_function(ATEN.cat.default, ([x, x],))
        part = graph.call_function(operator.getitem, (both, slice(place, None)))
        named = graph.call_function(dict, ({"x": x, "more": [part]},))
        got, shown = straight_line(module_of(part, named, graph=graph))([torch.arange(3.0), 4])
        assert got.tolist() == [1.0, 2.0]
        assert shown["more"][0] is got

    def test_attributes_of_the_module(self) -> None:
        root = nn.Module()
        root.inner = nn.Module()
        root.inner.weight = nn.Parameter(torch.full((3,), 5.0))
        graph = fx.Graph()
        weight = graph.get_attr("inner.weight")
        out = graph.call_function(ATEN.mul.Tensor, (weight, graph.placeholder("x")))
        (got,) = straight_line(module_of(out, graph=graph, root=root))([torch.arange(3.0)])
        assert got.tolist() == [0.0, 5.0, 10.0]


def test_names_that_python_would_misread() -> None:
    graph = fx.Graph()
    x = graph.create_node("placeholder", "constant_0", name="constant_0")
    y = graph.create_node("placeholder", "arguments", name="arguments")
    out = graph.call_function(ATEN.add.Tensor, (x, y))
    assert straight_line(module_of(out, graph=graph))([torch.ones(1), torch.ones(1)])[0].item() == 2.0


def test_nothing_comes_in_and_nothing_goes_out() -> None:
    graph = fx.Graph()
    ones = graph.call_function(ATEN.ones.default, ([2],))
    assert torch.equal(straight_line(module_of(ones, graph=graph))([])[0], torch.ones(2))
    graph = fx.Graph()
    graph.placeholder("x")
    assert straight_line(module_of(None, 3, graph=graph))([torch.ones(1)]) == (None, 3)


def test_a_value_returned_twice() -> None:
    graph = fx.Graph()
    out = graph.call_function(ATEN.sin.default, (graph.placeholder("x"),))
    first, second = straight_line(module_of(out, out, graph=graph))([torch.ones(2)])
    assert first is second
