import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fuselayers.partition import capture
from fuselayers.partition.node_kinds import (
    is_fusible,
    source_line,
    why_runs_once,
)
from tests.partition.tracing import joint_graph_of


def nodes_of(fn: Callable[..., object], *args: Tensor) -> dict[str, fx.Node]:
    module = make_fx(fn, tracing_mode="fake")(*args)
    return {str(node.target): node for node in module.graph.nodes if node.op == "call_function"}


X = torch.ones(4, 6)


class TestRunsOnce:
    @pytest.mark.parametrize(
        ("fn", "reason"),
        [
            (lambda x: x.sin(), None),
            (lambda x: x @ x.new_ones(6, 2), None),
            (lambda x: torch.rand_like(x), "it draws random numbers"),
            (lambda x: torch.native_dropout(x, 0.5, True), "it draws random numbers"),
            (lambda x: x.nonzero(), "its shape depends on the data"),
            (lambda x: x.add_(1), "it changes its input"),
        ],
        ids=["sin", "mm", "rand", "dropout", "nonzero", "add_"],
    )
    def test_by_its_schema_and_tags(self, fn: Callable[[Tensor], object], reason: str | None) -> None:
        assert why_runs_once(list(nodes_of(fn, X).values())[-1 if reason is None else 0]) == reason

    def test_an_index_of_places_may_be_taken_again_a_mask_may_not(self) -> None:
        places, mask = torch.tensor([0, 2]), torch.tensor([True, False, True, False])
        assert why_runs_once(nodes_of(lambda x, i: x[i], X, places)["aten.index.Tensor"]) is None
        graph = fx.Graph()
        x, index = graph.placeholder("x"), graph.placeholder("index")
        x.meta["val"], index.meta["val"] = X, mask
        taken = graph.call_function(torch.ops.aten.index.Tensor, (x, [index]))
        assert why_runs_once(taken) == "its shape depends on the data"

    def test_a_placeholder_and_a_constant(self) -> None:
        graph = fx.Graph()
        assert why_runs_once(graph.placeholder("x")) == "it is an input"
        assert why_runs_once(graph.get_attr("constant")) == "it is an attribute of the graph"

    def test_a_collective(self) -> None:
        pytest.importorskip("torch.distributed._functional_collectives")
        graph = fx.Graph()
        reduced = graph.call_function(
            torch.ops._c10d_functional.all_reduce.default, (graph.placeholder("x"), "sum", "")
        )
        assert why_runs_once(reduced) == "it communicates with other processes"

    def test_a_higher_order_op(self) -> None:
        graph = fx.Graph()
        effect = graph.call_function(torch.ops.higher_order.with_effects, ())
        assert why_runs_once(effect) == "it is a higher-order op, whose effects are not known"

    @pytest.mark.parametrize("p", [0.0, 0.5])
    def test_attention_draws_only_for_its_dropout(self, p: float) -> None:
        graph = fx.Graph()
        q, k, v = (graph.placeholder(name) for name in "qkv")
        op = torch.ops.aten._scaled_dot_product_flash_attention.default
        assert torch.Tag.nondeterministic_seeded in op.tags
        expected = None if p == 0 else "it draws random numbers"
        assert why_runs_once(graph.call_function(op, (q, k, v, p))) == expected
        assert why_runs_once(graph.call_function(op, (q, k, v), {"dropout_p": p})) == expected
        assert why_runs_once(graph.call_function(op, (q, k, v))) is None  # its default is 0

    def test_inductors_masks_are_functions_of_a_seed(self) -> None:
        (graph,) = capture(lambda x: x * torch.rand_like(x), torch.ones(4, requires_grad=True))
        node = {str(node.target): node for node in graph.module.graph.nodes}
        assert why_runs_once(node["prims.inductor_seeds.default"]) == "it draws random numbers"
        for name in ("prims.inductor_lookup_seed.default", "prims.inductor_random.default"):
            assert why_runs_once(node[name]) is None
            assert is_fusible(node[name])


class TestSourceLine:
    def test_of_a_traced_function(self) -> None:
        def layer(x: Tensor) -> Tensor:
            return x.exp().cos()

        joint = joint_graph_of(layer, torch.ones(3, requires_grad=True))
        exponential = next(node for node in joint.nodes if node.target is torch.ops.aten.exp.default)
        line = inspect.getsourcelines(layer)[1] + 1
        file, at, rest = source_line(exponential).partition(f":{line}: ")
        assert Path(file) == Path(__file__)
        assert at
        assert rest == "return x.exp().cos()"

    def test_lines_of_torch_and_of_the_tracer_are_nobodys(self) -> None:
        node, own = fx.Graph().placeholder("x"), Path(capture.__code__.co_filename)
        entry, users = (
            f'File "{own}", line 3, in entry\n    return traced_fn()\n',
            'File "/a.py", line 1, in f\n    g()\n',
        )
        inside = f'File "{torch.__path__[0]}/nn/functional.py", line 7, in gelu\n    return torch._C.gelu()\n'
        node.meta["stack_trace"] = entry + users + inside
        assert source_line(node) == "/a.py:1: g()"
        node.meta["stack_trace"] = entry + inside
        assert source_line(node) == ""

    def test_the_innermost_line_counts(self) -> None:
        node = fx.Graph().placeholder("x")
        node.meta["stack_trace"] = (
            '  File "/a/outer.py", line 3, in forward\n    y = f(x)\n'
            '  File "/a/in, ner.py", line 17, in f\n    return x.exp()\n           ^^^^^^^\n'
        )
        assert source_line(node) in ("/a/in, ner.py:17: return x.exp()",)
