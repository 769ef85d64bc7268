"""A region as a definition: what is written for which inputs, and what each op of the tables computes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from fuselayers.partition.compilers.nvfuser.regions import RULES
from fuselayers.partition.compilers.nvfuser.translate import TensorLayout, layout_of, order_of, text_of
from tests.partition.compilers.nvfuser.fusion_definition import StandIn
from tests.partition.compilers.nvfuser.tracing import CPU, as_tuple, graph_of, region_of

aten = torch.ops.aten


def results_of(fn: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    return graph_of(lambda *given: as_tuple(fn(*given)), *inputs).graph


def script_of(stand_in: StandIn, fn: Callable[..., Any], *inputs: Any) -> list[str]:
    region_of(fn, *inputs)(*inputs)
    return stand_in.defined[-1].script().splitlines()


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
    **{getattr(aten, name).default: (_STRANGE,) for name in ("isfinite", "isinf", "isnan", "isneginf", "isposinf")},
    **{getattr(aten, name).default: (_STRANGE,) for name in ("sign", "sgn", "relu", "abs")},
    **{getattr(aten, name).Tensor: (WHOLE, WHOLE.flip(0)) for name in ("bitwise_and", "bitwise_or")},
    **{getattr(aten, name).Scalar: (WHOLE, 5) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    **{getattr(aten, name).Tensor: (TRUE, ~TRUE[:1]) for name in ("__and__", "__or__", "__xor__")},
    **{getattr(aten, name).Scalar: (WHOLE, 5) for name in ("__and__", "__or__", "__xor__")},
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
    aten.where.ScalarSelf: (TRUE, 2.0, X),
    aten.where.ScalarOther: (TRUE, X, 2.0),
    aten.where.Scalar: (TRUE, 2.0, -1.0),
    aten.clamp.default: (_STRANGE, -1.0, 1.0),
    aten.clamp.Tensor: (X, X * 0 - 1, None),
    aten.clamp_min.default: (_STRANGE, 0.5),
    aten.clamp_min.Tensor: (X, BELOW),
    aten.clamp_max.default: (_STRANGE, 0.5),
    aten.clamp_max.Tensor: (X, BELOW),
    torch.ops.prims.convert_element_type.default: (X, torch.int32),
    aten.var.correction: (X, [1]),
    aten.var_mean.correction: (X, [0]),
    aten.sum.dim_IntList: (X, [-1], True),
    aten.mean.dim: (X, [0, 1], True),
    aten.amax.default: (X, [1]),
    aten.amin.default: (X, [0], True),
    aten.view.default: (X, [2, 6]),
    aten._unsafe_view.default: (X, [12]),
    aten.reshape.default: (X, [3, 1, 4]),
    aten.permute.default: (X, [1, 0]),
    aten.transpose.int: (X, -1, 0),
    aten.unsqueeze.default: (X, -1),
    aten.squeeze.default: (X[None, :, None],),
    aten.squeeze.dim: (X[None], 0),
    aten.squeeze.dims: (X[None, :, None], [0, 1, 2]),
    aten.expand.default: (X[:1], [2, 3, -1]),
    aten.slice.Tensor: (X, 1, -3, 9223372036854775807),
    aten.split.Tensor: (X, 3, 1),
    aten.split_with_sizes.default: (X, [1, 3], -1),
    aten.unbind.int: (X, 1),
    aten.select.int: (X, 1, -2),
    aten.cat.default: ([X, X[:1]], 0),
    aten.constant_pad_nd.default: (X, [1, 2, 0, 1], 3.0),
    aten.slice_backward.default: (X, [3, 9], 1, -6, -2, 1),
    aten.full.default: ([3, 2], 1.5),
    aten.full_like.default: (X, 2),
    aten.fill.Scalar: (X, 2),
    aten.scalar_tensor.default: (2.5,),
    aten.arange.default: (5,),
    aten.arange.start: (-2, 5),
    aten.arange.start_step: (3, 7, 1),
    torch.ops.prims.iota.default: (5,),
}
_NAMED: dict[Any, dict[str, Any]] = {
    torch.ops.prims.iota.default: {
        "start": 3,
        "step": 2,
        "dtype": torch.int64,
        "device": CPU,
        "requires_grad": False,
    },
    aten._to_copy.default: {"dtype": torch.float64},
    aten.var.correction: {"correction": 0, "keepdim": True},
    aten.sub.Tensor: {"alpha": 2},
    aten.add.Tensor: {"alpha": 0.5},
    aten.cat.default: {},
}


def arguments_of(target: Any) -> tuple[Any, ...]:
    if target in _ARGUMENTS:
        return _ARGUMENTS[target]
    tensors = [one for one in target._schema.arguments if str(one.type) in ("Tensor", "number") and not one.kwarg_only]
    left = _ONE_FLOAT.get(target.overloadpacket, X)
    right = (X.flip(0)[:1] + 0.1) if "Tensor" in [str(one.type) for one in tensors[1:2]] else 0.7
    return (left, right)[: min(len(tensors), 2)] if "alpha" not in [one.name for one in tensors] else (left, right)


OPS = [target for target in RULES if target is not operator.getitem]


@pytest.mark.parametrize("target", OPS, ids=str)
def test_an_op_computes_what_torch_does(target: Any, on_the_cpu: StandIn) -> None:
    """With something computed before and behind it, so that views stand in the middle of a region."""
    arguments, named = arguments_of(target), _NAMED.get(target, {})
    places = [place for place, one in enumerate(arguments) if isinstance(one, Tensor)]
    given = [arguments[place] for place in places] or [X]
    lists = isinstance(arguments[0], list) and isinstance(arguments[0][0], Tensor)
    given = arguments[0] if lists else given

    def fn(*tensors: Tensor) -> Any:
        tensors = tuple(one.neg().neg() if one.is_floating_point() else ~(~one) for one in tensors)
        filled: list[Any] = [list(tensors), *arguments[1:]] if lists else list(arguments)
        for place, tensor in zip(places, tensors, strict=False):
            filled[place] = tensor
        made = target(*filled, **named)
        return tuple(made) if isinstance(made, list | tuple) else made

    results = region_of(fn, *given)(*given)
    expected = target(*arguments, **named)
    expected = tuple(expected) if isinstance(expected, list) else as_tuple(expected)
    torch.testing.assert_close(tuple(results), expected, equal_nan=True)
    assert on_the_cpu.executions == 1


class TestHalfPrecisions:
    def test_are_read_once_and_rounded_at_the_end(self, on_the_cpu: StandIn) -> None:
        x = torch.randn(3, 4, dtype=torch.bfloat16)
        script = script_of(on_the_cpu, lambda x: ((x + 1).float().bfloat16() * x).sin(), x)
        assert [line for line in script if "cast" in line] == [
            "t1 = fd.ops.cast(arg=t0, dtype=DataType.Float)",
            "t5 = fd.ops.cast(arg=t4, dtype=DataType.BFloat16)",
        ]

    def test_a_result_that_is_also_read_is_rounded_for_the_caller_alone(self, on_the_cpu: StandIn) -> None:
        x = torch.full((2, 2), 1 / 3, dtype=torch.float16)
        (third, back) = region_of(lambda x: ((y := x / 3), (y.float() * 3))[:2], x)(x)
        assert third.dtype == torch.float16
        assert torch.equal(back, (x.float() / 3) * 3)


class TestScalars:
    def test_a_number_takes_the_kind_of_the_tensor(self, on_the_cpu: StandIn) -> None:
        script = script_of(on_the_cpu, lambda x: (x * 2).to(torch.int64) * 2 + 1, X)
        assert [line.split(" = ")[1] for line in script[1:-1]] == [
            "fd.ops.mul(t0, 2.0)",
            "fd.ops.cast(arg=t1, dtype=DataType.Int)",
            "fd.ops.mul(t2, 2)",
            "fd.ops.add(t3, 1)",
        ]

    def test_a_double_without_dimensions_does_not_widen_the_rest(self, on_the_cpu: StandIn) -> None:
        number = torch.tensor(2.5, dtype=torch.float64)
        (result,) = region_of(lambda x, number: (x * number).sin(), X, number)(X, number)
        torch.testing.assert_close(result, (X * number).sin())
        assert "dtype=DataType.Double, is_cpu=True" in on_the_cpu.defined[-1].script().splitlines()[1]


class TestLayouts:
    @pytest.mark.parametrize(
        ("tensor", "shape", "contiguity", "stride_order"),
        [
            (torch.empty(3, 4), (-1, -1), (True, True), (1, 0)),
            (torch.empty(3, 4).t(), (-1, -1), (True, True), (0, 1)),
            (torch.empty(3, 8)[:, ::2], (-1, -1), (True, False), (1, 0)),
            (torch.empty(3, 8)[:, :4], (-1, -1), (False, True), (1, 0)),
            (torch.empty(3, 1, 4), (-1, 1, -1), (True, None, True), (2, 1, 0)),
            (torch.empty(4).expand(3, 4), (-1, -1), (None, True), (1, 0)),
            (torch.empty(3, 1).expand(3, 4), (-1, -1), (True, None), (1, 0)),
            (torch.empty(2, 3, 4).permute(2, 0, 1), (-1, -1, -1), (True, True, True), (0, 2, 1)),
            (torch.empty(()), (), (), ()),
        ],
    )
    def test_a_layout_is_what_nvfuser_calls_it(
        self, tensor: Tensor, shape: Any, contiguity: Any, stride_order: Any, nvfuser_stand_in: StandIn
    ) -> None:
        (layout,) = layout_of([tensor])
        assert layout == TensorLayout(shape, contiguity, stride_order, torch.float32, tensor.dim() == 0)
        found = nvfuser_stand_in.compute_tensor_descriptor(tensor.shape, tensor.stride())
        assert (list(contiguity), list(stride_order)) == found

    @pytest.mark.parametrize(
        "prepared",
        [
            Tensor.contiguous,
            lambda x: x.t().contiguous().t(),
            lambda x: x[:, ::2],
            lambda x: x[:1],
            lambda x: x[:, :1].expand(-1, 5),
            lambda x: x[0].expand(4, -1),
            lambda x: x[1:, 1:],
        ],
    )
    def test_a_result_has_torchs_strides(self, prepared: Callable[[Tensor], Tensor], on_the_cpu: StandIn) -> None:
        x = prepared(torch.randn(6, 8))
        (result,) = region_of(lambda x: x.sin().cos(), x)(x)
        expected = x.sin().cos()
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()

    def test_an_order_other_than_rows_is_asked_for(self, on_the_cpu: StandIn) -> None:
        script = script_of(on_the_cpu, lambda x: x.sin().cos(), X.t())
        assert script[-2] == "t3 = fd.ops.stride_order(arg=t2, stride_order=[0, 1])"
        # And rows are, where an input lies otherwise: nvFuser would go by the input.
        script = script_of(on_the_cpu, lambda x, y: (x.sin() + y).cos(), X, X.t().contiguous().t())
        assert script[-2] == "t5 = fd.ops.stride_order(arg=t4, stride_order=[1, 0])"

    def test_two_equal_results_are_two_tensors(self, on_the_cpu: StandIn) -> None:
        first, second, same = region_of(lambda x: ((y := x.sin()), y.pow(1), x.pow(1)), X)(X)
        assert torch.equal(first, second)
        assert torch.equal(same, X)
        assert len({first.data_ptr(), second.data_ptr(), same.data_ptr(), X.data_ptr()}) == 4


class TestText:
    def test_does_not_depend_on_sizes_or_names(self) -> None:
        one = results_of(lambda x: (x.sin() * 2).sum(0), torch.empty(3, 4))
        other = results_of(lambda y: (y.sin() * 2).sum(0), torch.empty(5, 6))
        assert text_of(one) == text_of(other)

    @pytest.mark.parametrize(
        ("fn", "shape"),
        [
            (lambda x: (x.sin() * 2).sum(0), (1, 4)),
            (lambda x: (x.sin() * 3).sum(0), (3, 4)),
            (lambda x: (x.sin() * 2).sum(1), (3, 4)),
            (lambda x: (x.double().sin() * 2).sum(0), (3, 4)),
        ],
    )
    def test_depends_on_all_else(self, fn: Callable[..., Any], shape: tuple[int, ...]) -> None:
        assert text_of(results_of(fn, torch.empty(shape))) != text_of(
            results_of(lambda x: (x.sin() * 2).sum(0), torch.empty(3, 4))
        )

    def test_holds_the_sizes_that_a_view_is_made_of(self) -> None:
        one, other = (results_of(lambda x: x.sin()[:, -2:].cos(), torch.empty(3, size)) for size in (4, 5))
        assert text_of(one) != text_of(other)


def test_an_order_is_from_the_outermost_in() -> None:
    assert order_of(torch.empty(2, 3, 4).permute(2, 0, 1)) == (1, 2, 0)
