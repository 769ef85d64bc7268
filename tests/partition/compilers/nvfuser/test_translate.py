"""The definition of a region: inputs by their layout, half precision, constants, outputs; and a region's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from fuselayers.partition.compilers.nvfuser.translate import TensorLayout, layout_of, order_of, text_of
from tests.partition.compilers.nvfuser.build_definitions import build
from tests.partition.compilers.nvfuser.interpreter import StandIn
from tests.partition.compilers.nvfuser.tracing import as_tuple, graph_of, region_of, script_of

X = torch.linspace(-2, 2, 12).view(3, 4)


def test_a_script_makes_its_definition_again(on_the_cpu: StandIn) -> None:
    """`make test-nvfuser` runs these scripts in the real nvFuser."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().transpose(0, 1) * float("inf"), x.unsqueeze(0).half().sum(1)

    script = script_of(on_the_cpu, fn, X[:, :1])
    build("\n".join(script), on_the_cpu)
    assert on_the_cpu.defined[-1].script().splitlines() == script


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
        self, tensor: Tensor, shape: Any, contiguity: Any, stride_order: Any
    ) -> None:
        """The values are those of nvFuser's `compute_tensor_descriptor`."""
        expected = TensorLayout(shape, contiguity, stride_order, torch.float32, tensor.dim() == 0)
        assert layout_of([tensor]) == (expected,)

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

    def test_equal_results_are_separate_tensors(self, on_the_cpu: StandIn) -> None:
        first, second, same = region_of(lambda x: ((y := x.sin()), y.pow(1), x.pow(1)), X)(X)
        assert torch.equal(first, second)
        assert torch.equal(same, X)
        assert len({first.data_ptr(), second.data_ptr(), same.data_ptr(), X.data_ptr()}) == 4

    def test_an_order_starts_with_the_outermost_dimension(self) -> None:
        assert order_of(torch.empty(2, 3, 4).permute(2, 0, 1)) == (1, 2, 0)


class TestHalfPrecision:
    def test_is_cast_once_on_reading_and_once_on_returning(self, on_the_cpu: StandIn) -> None:
        x = torch.randn(3, 4, dtype=torch.bfloat16)
        script = script_of(on_the_cpu, lambda x: ((x + 1).float().bfloat16() * x).sin(), x)
        assert [line for line in script if "cast" in line] == [
            "t1 = fd.ops.cast(t0, DataType.Float)",
            "t5 = fd.ops.cast(t4, DataType.BFloat16)",
        ]

    def test_a_result_that_is_also_read_is_rounded_for_the_caller_alone(self, on_the_cpu: StandIn) -> None:
        x = torch.full((2, 2), 1 / 3, dtype=torch.float16)
        (third, back) = region_of(lambda x: ((y := x / 3), (y.float() * 3))[:2], x)(x)
        assert third.dtype == torch.float16
        assert torch.equal(back, (x.float() / 3) * 3)


class TestScalars:
    def test_a_number_has_the_kind_of_the_tensor(self, on_the_cpu: StandIn) -> None:
        script = script_of(on_the_cpu, lambda x: (x * 2).to(torch.int64) * 2 + 1, X)
        assert [line.split(" = ")[1] for line in script[1:-1]] == [
            "fd.ops.mul(t0, 2.0)",
            "fd.ops.cast(t1, DataType.Int)",
            "fd.ops.mul(t2, 2)",
            "fd.ops.add(t3, 1)",
        ]

    @pytest.mark.parametrize(
        "fn",
        [
            lambda x: ~((x > 0) & (x < 1)),
            lambda x: torch.where(x > 0, x < 1, True),
            lambda x: torch.full((3, 4), True) & (x > 0),
        ],
    )
    def test_a_boolean_is_no_integer(self, fn: Callable[[Tensor], Tensor], on_the_cpu: StandIn) -> None:
        (result,) = region_of(fn, X)(X)
        assert result.dtype == torch.bool
        assert torch.equal(result, fn(X))
        assert on_the_cpu.executions == 1

    def test_a_double_without_dimensions_does_not_widen_the_rest(self, on_the_cpu: StandIn) -> None:
        number = torch.tensor(2.5, dtype=torch.float64)
        (result,) = region_of(lambda x, number: (x * number).sin(), X, number)(X, number)
        torch.testing.assert_close(result, (X * number).sin())
        assert "dtype=DataType.Double, is_cpu=True" in on_the_cpu.defined[-1].script().splitlines()[1]


class TestText:
    """Regions of one text share their definitions."""

    def graph(self, fn: Callable[..., Any], shape: tuple[int, ...]) -> fx.Graph:
        return graph_of(lambda *given: as_tuple(fn(*given)), torch.empty(shape)).graph

    def test_does_not_depend_on_sizes_or_names(self) -> None:
        one = self.graph(lambda x: (x.sin() * 2).sum(0), (3, 4))
        other = self.graph(lambda y: (y.sin() * 2).sum(0), (5, 6))
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
    def test_depends_on_the_rest(self, fn: Callable[..., Any], shape: tuple[int, ...]) -> None:
        assert text_of(self.graph(fn, shape)) != text_of(self.graph(lambda x: (x.sin() * 2).sum(0), (3, 4)))

    def test_holds_the_sizes_of_a_views_source(self) -> None:
        one, other = (self.graph(lambda x: x.sin().view(-1).cos(), (3, size)) for size in (4, 5))
        assert text_of(one) != text_of(other)
