"""Each reduction computes what torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuselayers.partition.compilers.nvfuser.reductions import REDUCTIONS
from fuselayers.partition.compilers.nvfuser.regions import rule_of
from tests.partition.compilers.nvfuser.fusion_definition import StandIn
from tests.partition.compilers.nvfuser.tracing import CPU, assert_op, graph_of

aten = torch.ops.aten

X = torch.linspace(-2, 2, 12).view(3, 4)
_ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    aten.var.correction: (X, [1]),
    aten.var_mean.correction: (X, [0]),
    aten.sum.dim_IntList: (X, [-1], True),
    aten.mean.dim: (X, [0, 1], True),
    aten.amax.default: (X, [1]),
    aten.amin.default: (X, [0], True),
}
_NAMED: dict[Any, dict[str, Any]] = {aten.var.correction: {"correction": 0, "keepdim": True}}


@pytest.mark.parametrize("target", REDUCTIONS, ids=str)
def test_an_op_computes_what_torch_does(target: Any, on_the_cpu: StandIn) -> None:
    assert_op(target, _ARGUMENTS.get(target, (X,)), _NAMED.get(target, {}), on_the_cpu)


@pytest.mark.parametrize("x", [torch.arange(6).view(2, 3), torch.arange(6).view(2, 3) > 2], ids=["int64", "bool"])
def test_a_sum_of_whole_numbers_is_one(x: torch.Tensor, on_the_cpu: StandIn) -> None:
    assert_op(aten.sum.dim_IntList, (x, [1]), {}, on_the_cpu)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_a_sum_is_in_the_dtype_that_was_asked_for(dtype: torch.dtype, on_the_cpu: StandIn) -> None:
    assert_op(aten.sum.dim_IntList, (torch.arange(6).view(2, 3), [1]), {"dtype": dtype}, on_the_cpu)


def test_what_has_no_dimensions_is_left_to_torch(on_the_cpu: StandIn) -> None:
    module = graph_of(lambda x: x.sum(), torch.tensor(2.0))
    assert [rule_of(node, CPU) for node in module.graph.nodes if node.op == "call_function"] == [None]
