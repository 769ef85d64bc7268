"""A clock that gives the times a test needs, and functions to fuse, for the tests of "auto"."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.partition import FusedFunction, GraphReport
from fuselayers.partition.auto import copies_of
from fuselayers.partition.compilers import compile_eager

__all__ = ["Measured", "check", "eager_for_inductor", "inputs", "only", "wave"]


def eager_for_inductor(patch: pytest.MonkeyPatch) -> None:
    """Let the eager backend stand in for Inductor, which takes seconds to compile, under Inductor's name."""
    module: Any = sys.modules["fuselayers.partition.backends"]  # by attributes it is the function
    patch.setattr(module, "_COMPILERS", {**module._COMPILERS, "inductor": compile_eager})


class Measured:
    """Stands in for `seconds_of`: runs each candidate once and returns that one of them is the fastest."""

    def __init__(self, fastest: str) -> None:
        self.fastest = fastest
        self.asked: list[list[str]] = []

    def __call__(
        self,
        candidates: Mapping[str, Callable[..., Any]],
        inputs: Sequence[Any],
        *,
        overwritten: frozenset[int],
    ) -> dict[str, float]:
        self.asked.append(list(candidates))
        for run in candidates.values():
            run(*copies_of(inputs, overwritten)[0])
        return {name: 1.0 if name == self.fastest else 2.0 for name in candidates}


def wave(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).cos().cos()


def inputs(size: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(size, requires_grad=True), torch.randn(size)


def only(fused: FusedFunction) -> GraphReport:
    (graph,) = fused.report().graphs
    return graph


def check(fused: FusedFunction, *args: Tensor) -> None:
    """Values and gradients are those of the plain function."""
    leaves = [one for one in args if one.requires_grad]
    results = []
    for fn in (fused.fn, fused):
        out = fn(*args)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(results[0], results[1])
