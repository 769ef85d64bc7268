"""What a translation writes once, and in which dtype it computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.partition.compilers.nvfuser.fusion_definition import StandIn
from tests.partition.compilers.nvfuser.tracing import region_of, script_of

X = torch.linspace(-2, 2, 12).view(3, 4)


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

    @pytest.mark.parametrize(
        "fn",
        [
            lambda x: ~((x > 0) ^ True),
            lambda x: ~((x > 0) & True),
            lambda x: (x > 0) | False,
            lambda x: torch.where(x > 0, x < 1, True),
            lambda x: torch.nn.functional.pad(x > 0, (1, 1), value=True),
            lambda x: torch.full_like(x, 1, dtype=torch.bool) & (x > 0),
        ],
    )
    def test_a_truth_is_no_integer(self, fn: Callable[[Tensor], Tensor], on_the_cpu: StandIn) -> None:
        (result,) = region_of(fn, X)(X)
        assert result.dtype == torch.bool
        assert torch.equal(result, fn(X))
        assert on_the_cpu.executions == 1

    def test_a_double_without_dimensions_does_not_widen_the_rest(self, on_the_cpu: StandIn) -> None:
        number = torch.tensor(2.5, dtype=torch.float64)
        (result,) = region_of(lambda x, number: (x * number).sin(), X, number)(X, number)
        torch.testing.assert_close(result, (X * number).sin())
        assert "dtype=DataType.Double, is_cpu=True" in on_the_cpu.defined[-1].script().splitlines()[1]


def test_what_is_written_is_written_once(on_the_cpu: StandIn) -> None:
    """A cast, a wider look and a size, each for two readers."""
    bias = torch.randn(4, dtype=torch.bfloat16)
    script = script_of(on_the_cpu, lambda x, bias: (x + bias) * bias + x.mean(0) * x.mean((0, 1)), X, bias)
    calls = [line.partition(" = ")[2] for line in script]
    assert len(calls) == len(set(calls))
