"""nvFuser as a backend by name, at the head of a fallback chain, and as a candidate of "auto"."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import errors
from fuselayers.partition import BackendUnavailableError, FallbackWarning, auto, fuse, warm_up
from tests.partition.compilers.nvfuser.interpreter import StandIn
from tests.partition.measured import eager_for_inductor

CHAIN = ("triton", "inductor", "eager")
ON_A_CPU = "nvFuser compiles for CUDA only, and this runs on a CPU"


def wave(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).cos().cos()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 7, requires_grad=True), torch.randn(7)


def test_the_chain_is_tried_in_order_with_one_warning_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())
    eager_for_inductor(monkeypatch)
    fused = fuse(wave, backend="nvfuser", fallback=CHAIN)
    a, b = inputs()
    with pytest.warns(FallbackWarning) as said:
        torch.testing.assert_close(fused(a, b), wave(a, b))
    assert [str(one.message) for one in said if one.category is FallbackWarning] == [
        f"backend 'nvfuser' is not used: {ON_A_CPU}; 'inductor' serves instead",
        "backend 'triton' is not used: Triton compiles for GPUs, and this runs on a CPU; 'inductor' serves instead",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        again = fuse(torch.tan, backend="nvfuser", fallback=CHAIN)
        again(torch.ones(3))
    (report,) = again.report().graphs
    assert report.served_by == "inductor"
    assert report.reason == (
        f"since nvfuser is not used: {ON_A_CPU}; "
        "since triton is not used: Triton compiles for GPUs, and this runs on a CPU"
    )


def test_without_a_fallback_it_raises() -> None:
    text = f"no backend could compile this function (nvfuser: {ON_A_CPU}); mend the cause, or allow fallback=('eager',)"
    with pytest.raises(BackendUnavailableError, match=f"^{re.escape(text)}$"):
        fuse(wave, backend="nvfuser", fallback=())(*inputs())


def test_auto_measures_it_and_uses_it_if_it_is_fastest(
    on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    asked = []

    def measured(candidates: Any, inputs: Any, **_: Any) -> dict[str, float]:
        asked.append(list(candidates))
        return {name: 1.0 if name == "nvfuser" else 2.0 for name in candidates}

    monkeypatch.setattr(auto, "seconds_of", measured)
    a, b = inputs()
    with warm_up(0):
        for _ in range(2):  # measured, then remembered
            torch.compiler.reset()
            fused = fuse(wave)
            torch.testing.assert_close(fused(a, b), wave(a, b))
            assert fused.served_by == ("nvfuser",)
    assert asked == [["inductor", "nvfuser", "eager", "plain"]]
    assert sum(one.executions for one in on_the_cpu.defined) == 2


def test_a_pinned_choice_of_it(on_the_cpu: StandIn) -> None:
    a, b = inputs()
    fused = fuse(wave, backend="pinned:nvfuser", fallback=())
    torch.testing.assert_close(torch.autograd.grad(fused(a, b).sum(), a), torch.autograd.grad(wave(a, b).sum(), a))
    assert fused.served_by == ("nvfuser",)
    assert on_the_cpu.defined
