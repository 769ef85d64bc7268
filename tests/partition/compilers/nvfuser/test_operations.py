"""Each op of the tables, alone in a region, gives what torch gives."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.partition.compilers.nvfuser.regions import RULES, rule_of
from tests.partition.compilers.nvfuser.interpreter import StandIn
from tests.partition.compilers.nvfuser.tracing import CPU, assert_op, graph_of, region_of, script_of

aten, prims = torch.ops.aten, torch.ops.prims

X = torch.linspace(-2, 2, 12).view(3, 4)
POSITIVE = X.abs() + 0.5
INTEGERS = torch.arange(-6, 6).view(3, 4)
MASK = X > 0
SPECIAL = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan])

# The first operand, where an op is not defined for X.
DOMAINS = {
    **dict.fromkeys((aten.log, aten.log1p, aten.rsqrt, aten.sqrt), POSITIVE),
    **dict.fromkeys((aten.relu, aten.abs), SPECIAL),
    **dict.fromkeys((aten.bitwise_not, aten.logical_not), INTEGERS),
}
ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    **{getattr(aten, f"bitwise_{name}").Tensor: (INTEGERS, INTEGERS.flip(0)) for name in ("and", "or")},
    aten.logical_and.default: (INTEGERS, X),
    aten.logical_or.default: (MASK, X),
    aten.pow.Tensor_Scalar: (POSITIVE, 2.5),
    aten.where.self: (MASK, X, X[0]),
    aten.clamp.default: (SPECIAL, -1.0, 1.0),
    prims.convert_element_type.default: (X, torch.int32),
    aten.var_mean.correction: (X, [0]),
    aten.sum.dim_IntList: (X, [-1], True),
    aten.mean.dim: (X, [0, 1], True),
    aten.amax.default: (X, [1]),
    aten.view.default: (X, [2, 6]),
    aten._unsafe_view.default: (X, [12]),
    aten.permute.default: (X, [1, 0]),
    aten.transpose.int: (X, -1, 0),
    aten.unsqueeze.default: (X, -1),
    aten.squeeze.default: (X[None, :, None],),
    aten.squeeze.dim: (X[None], 0),
    aten.squeeze.dims: (X[None, :, None], [0, 1, 2]),
    aten.expand.default: (X[:1], [2, 3, -1]),
    aten.cat.default: ([X, X[:1]], 0),
    aten.full.default: ([3, 2], 1.5),
    aten.full_like.default: (X, 2),
    aten.scalar_tensor.default: (2.5,),
}
KEYWORDS: dict[Any, dict[str, Any]] = {
    aten._to_copy.default: {"dtype": torch.float64},
    aten.var_mean.correction: {"correction": 0, "keepdim": True},
}


def arguments_of(target: Any) -> tuple[Any, ...]:
    if target in ARGUMENTS:
        return ARGUMENTS[target]
    types = [str(one.type) for one in target._schema.arguments if not one.kwarg_only][:2]
    left, right = DOMAINS.get(target.overloadpacket, X), (X.flip(0)[:1] + 0.1 if types[1:] == ["Tensor"] else 0.7)
    return (left, right) if types[1:] and types[1] in ("Tensor", "number") else (left,)


@pytest.mark.parametrize("target", [target for target in RULES if target is not operator.getitem], ids=str)
def test_an_op_gives_what_torch_gives(target: Any, on_the_cpu: StandIn) -> None:
    assert_op(target, arguments_of(target), KEYWORDS.get(target, {}), on_the_cpu)


@pytest.mark.parametrize("exponent", [1, 2, 3, 0.5, -0.5, -1, -2.5])
def test_a_power_gives_what_torch_gives(exponent: float, on_the_cpu: StandIn) -> None:
    assert_op(aten.pow.Tensor_Scalar, (POSITIVE, exponent), {}, on_the_cpu)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [0.1, 70001.0, 0.1 + 1e-5])
def test_half_precision_is_compared_with_the_rounded_number(
    dtype: torch.dtype, number: float, on_the_cpu: StandIn
) -> None:
    x = torch.tensor([number, 0.1, 0.2, math.inf]).to(dtype)

    def compared(x: Tensor) -> tuple[Tensor, ...]:
        return x == number, x <= number, x > number, x < number

    torch.testing.assert_close(tuple(region_of(compared, x)(x)), compared(x))
    assert on_the_cpu.executions == 1


def test_a_relu_of_integers_is_left_to_torch(on_the_cpu: StandIn) -> None:
    """nvFuser's goes through float32, which cannot hold 2**24 + 1."""
    module = graph_of(lambda x: (x * 3).relu() + 1, torch.tensor([2**24 + 1, -5]))
    rules = [rule_of(node, CPU) is not None for node in module.graph.nodes if node.op == "call_function"]
    assert rules == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_widened_for_every_op(dtype: torch.dtype, on_the_cpu: StandIn) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x == x, x.exp(), torch.cat([x, x])

    x = SPECIAL.to(dtype)
    torch.testing.assert_close(tuple(region_of(fn, x)(x)), fn(x), equal_nan=True)
    assert on_the_cpu.executions == 1


def test_a_cat_of_two_dtypes_has_their_common_one(on_the_cpu: StandIn) -> None:
    assert_op(aten.cat.default, ([X, INTEGERS], 0), {}, on_the_cpu)


@pytest.mark.parametrize("x", [INTEGERS, INTEGERS > 2], ids=["int64", "bool"])
def test_a_sum_of_integers_is_an_integer(x: Tensor, on_the_cpu: StandIn) -> None:
    assert_op(aten.sum.dim_IntList, (x, [1]), {}, on_the_cpu)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_a_sum_has_the_given_dtype(dtype: torch.dtype, on_the_cpu: StandIn) -> None:
    assert_op(aten.sum.dim_IntList, (INTEGERS, [1]), {"dtype": dtype}, on_the_cpu)


def test_a_reduction_of_no_dimensions_is_left_to_torch(on_the_cpu: StandIn) -> None:
    module = graph_of(lambda x: x.sum(), torch.tensor(2.0))
    assert [rule_of(node, CPU) for node in module.graph.nodes if node.op == "call_function"] == [None]


def test_sizes_of_one_come_and_go_without_a_reshape(on_the_cpu: StandIn) -> None:
    script = script_of(on_the_cpu, lambda x: x.sin().view(1, 3, 1, 4).cos().view(3, 4).exp(), X)
    calls = [line.partition("fd.ops.")[2].partition("(")[0] for line in script[1:-1]]
    assert calls == ["sin", "broadcast", "cos", "squeeze", "exp"]
