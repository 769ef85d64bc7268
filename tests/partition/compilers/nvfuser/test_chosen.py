"""nvFuser as a backend by name and at the head of a fallback chain."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import errors
from fuselayers.partition import BackendUnavailableError, FallbackWarning, fuse
from fuselayers.partition.compilers import compile_eager

CHAIN = ("triton", "inductor", "eager")
ON_A_CPU = "nvFuser compiles for CUDA only, and this runs on a CPU"


def wave(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).cos().cos()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 7, requires_grad=True), torch.randn(7)


def test_the_chain_is_tried_in_order_with_one_warning_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())
    module: Any = sys.modules["fuselayers.partition.backends"]  # by attributes it is the function
    # Inductor takes seconds to compile.
    monkeypatch.setattr(module, "_COMPILERS", {**module._COMPILERS, "inductor": compile_eager})
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
