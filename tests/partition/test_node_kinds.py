from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fuselayers.partition.node_kinds import (
    why_runs_once,
)


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

    def test_a_collective(self) -> None:
        pytest.importorskip("torch.distributed._functional_collectives")
        graph = fx.Graph()
        reduced = graph.call_function(
            torch.ops._c10d_functional.all_reduce.default, (graph.placeholder("x"), "sum", "")
        )
        assert why_runs_once(reduced) == "it communicates with other processes"

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
