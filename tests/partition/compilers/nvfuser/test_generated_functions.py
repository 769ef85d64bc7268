"""Fifty random compositions of ops, forward and backward, against float64."""

from __future__ import annotations

import pytest
import torch

from fuselayers.partition import fuse
from tests.generated_functions import SIZES, generated, inputs_of
from tests.partition.compilers.nvfuser.accuracy import assert_accurate, run
from tests.partition.compilers.nvfuser.interpreter import StandIn


@pytest.mark.parametrize(
    "number", [pytest.param(one, marks=() if one % 5 == 4 else pytest.mark.slow) for one in range(50)]
)
def test_a_generated_function_has_the_values_of_plain_torch(number: int, on_the_cpu: StandIn) -> None:
    fn = generated(number)
    dynamic = number % 10 == 9
    fused = fuse(fn, backend="nvfuser", fallback=(), dynamic=dynamic)
    # A dynamic graph is compiled for the first sizes and called with the second ones too.
    sizes = ((7, 129), (129, 7)) if dynamic else (SIZES[number % len(SIZES)],)
    for rows, columns in sizes:
        inputs = inputs_of(rows, columns)
        wide = [one.detach().double().requires_grad_() for one in inputs]
        plain, exact = (run(fn, given, incoming=torch.float32) for given in (inputs, wide))
        assert_accurate(run(fused, inputs, incoming=torch.float32), plain, exact)
    assert fused.served_by == ("nvfuser",)
    assert on_the_cpu.executions >= 2
