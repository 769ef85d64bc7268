"""Each elementwise op computes what torch does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fuselayers.partition.compilers.nvfuser.pointwise import POINTWISE
from fuselayers.partition.compilers.nvfuser.regions import rule_of
from tests.partition.compilers.nvfuser.fusion_definition import StandIn
from tests.partition.compilers.nvfuser.tracing import CPU, assert_op, graph_of, region_of

aten = torch.ops.aten

X = torch.linspace(-2, 2, 12).view(3, 4)
ABOVE = X.abs() + 0.5
BELOW = X / 3
WHOLE = torch.arange(-6, 6).view(3, 4)
TRUE = X > 0
_ONE_FLOAT = {
    aten.acos: BELOW,
    aten.acosh: ABOVE + 1,
    aten.asin: BELOW,
    aten.atanh: BELOW,
    aten.lgamma: ABOVE,
    aten.log: ABOVE,
    aten.log10: ABOVE,
    aten.log1p: ABOVE,
    aten.log2: ABOVE,
    aten.rsqrt: ABOVE,
    aten.sqrt: ABOVE,
}
_STRANGE = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan])
_ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    **{getattr(aten, name).default: (_STRANGE,) for name in ("isinf", "isnan", "isneginf", "isposinf")},
    **{getattr(aten, name).default: (_STRANGE,) for name in ("sign", "sgn", "relu", "abs")},
    **{getattr(aten, name).Tensor: (WHOLE, WHOLE.flip(0)) for name in ("bitwise_and", "bitwise_or")},
    **{getattr(aten, name).Scalar: (WHOLE, 5) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    **{getattr(aten, name).Tensor: (WHOLE, WHOLE.abs()) for name in ("__lshift__", "__rshift__")},
    **{getattr(aten, name).Scalar: (WHOLE, 3) for name in ("__lshift__", "__rshift__")},
    aten.bitwise_xor.Tensor: (WHOLE, WHOLE.flip(0)),
    aten.bitwise_left_shift.Tensor: (WHOLE, WHOLE.abs()),
    aten.bitwise_left_shift.Tensor_Scalar: (WHOLE, 3),
    aten.bitwise_right_shift.Tensor: (WHOLE, WHOLE.abs()),
    aten.bitwise_right_shift.Tensor_Scalar: (WHOLE, 3),
    aten.bitwise_not.default: (WHOLE,),
    aten.logical_not.default: (WHOLE,),
    aten.logical_and.default: (WHOLE, X),
    aten.logical_or.default: (TRUE, X),
    aten.pow.Tensor_Scalar: (ABOVE, 2.5),
    aten.pow.Tensor_Tensor: (ABOVE, X),
    aten.pow.Scalar: (2.0, X),
    aten.where.self: (TRUE, X, X[0]),
    aten.clamp.default: (_STRANGE, -1.0, 1.0),
    aten.clamp.Tensor: (X, X * 0 - 1, None),
    aten.clamp_min.default: (_STRANGE, 0.5),
    aten.clamp_min.Tensor: (X, BELOW),
    aten.clamp_max.default: (_STRANGE, 0.5),
    aten.clamp_max.Tensor: (X, BELOW),
    torch.ops.prims.convert_element_type.default: (X, torch.int32),
}
_NAMED: dict[Any, dict[str, Any]] = {
    aten._to_copy.default: {"dtype": torch.float64},
    aten.sub.Tensor: {"alpha": 2},
    aten.add.Tensor: {"alpha": 0.5},
}


def arguments_of(target: Any) -> tuple[Any, ...]:
    if target in _ARGUMENTS:
        return _ARGUMENTS[target]
    tensors = [one for one in target._schema.arguments if str(one.type) in ("Tensor", "number") and not one.kwarg_only]
    left = _ONE_FLOAT.get(target.overloadpacket, X)
    right = (X.flip(0)[:1] + 0.1) if "Tensor" in [str(one.type) for one in tensors[1:2]] else 0.7
    return (left, right)[: min(len(tensors), 2)] if "alpha" not in [one.name for one in tensors] else (left, right)


@pytest.mark.parametrize("target", POINTWISE, ids=str)
def test_an_op_computes_what_torch_does(target: Any, on_the_cpu: StandIn) -> None:
    assert_op(target, arguments_of(target), _NAMED.get(target, {}), on_the_cpu)


@pytest.mark.parametrize("exponent", [1, 2, 3, 0.5, -0.5, -1, -2.5])
def test_a_power_computes_what_torch_does(exponent: float, on_the_cpu: StandIn) -> None:
    assert_op(aten.pow.Tensor_Scalar, (ABOVE, exponent), {}, on_the_cpu)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [0.1, 70001.0, 0.1 + 1e-5])
def test_a_half_precision_is_compared_with_the_number_as_it_would_hold_it(
    dtype: torch.dtype, number: float, on_the_cpu: StandIn
) -> None:
    x = torch.tensor([number, 0.1, 0.2, math.inf]).to(dtype)

    def asked(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x == number, x <= number, x > number, x < number

    torch.testing.assert_close(tuple(region_of(asked, x)(x)), asked(x))
    assert on_the_cpu.executions == 1


def test_a_relu_of_integers_is_left_to_torch(on_the_cpu: StandIn) -> None:
    """nvFuser's goes through float32, where 2**24 + 1 is not."""
    whole = torch.tensor([2**24 + 1, -5])
    module = graph_of(lambda x: (x * 3).relu() + 1, whole)
    rules = [rule_of(node, CPU) is not None for node in module.graph.nodes if node.op == "call_function"]
    assert rules == [True, False, True]


def test_a_product_of_booleans_is_true_where_both_are(on_the_cpu: StandIn) -> None:
    assert_op(aten.mul.Tensor, (TRUE, ~TRUE[:1]), {}, on_the_cpu)
