"""A region as a definition: what is written for inputs that lie in one way or another in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from fuselayers.partition.compilers.nvfuser.translate import TensorLayout, layout_of, order_of, text_of
from tests.partition.compilers.nvfuser.fusion_definition import StandIn
from tests.partition.compilers.nvfuser.tracing import as_tuple, graph_of, region_of, script_of


def results_of(fn: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    return graph_of(lambda *given: as_tuple(fn(*given)), *inputs).graph


X = torch.linspace(-2, 2, 12).view(3, 4)


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
