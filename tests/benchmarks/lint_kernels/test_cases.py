import pkgutil
from collections.abc import Iterable
from importlib import import_module

import pytest

import fuselayers.ops
from benchmarks.lint_kernels.cases import CASES, Case, launches_of
from tests.benchmarks.lint_kernels.kernels import compiles


def _kernels() -> set[str]:
    names = set()
    for module in pkgutil.walk_packages(fuselayers.ops.__path__, "fuselayers.ops."):
        if module.name.startswith("fuselayers.ops.cpu._"):  # a library in C++
            continue
        for name, value in vars(import_module(module.name)).items():
            if name.endswith("_kernel") and getattr(value, "__module__", "") == module.name:
                names.add(f"{module.name}.{name}")
    return names


def _launched(cases: Iterable[Case]) -> set[str]:
    return {f"{launch.function.module}.{launch.function.__name__}" for case in cases for launch in launches_of(case)}


@compiles
@pytest.mark.slow
def test_the_daily_set_launches_every_kernel() -> None:
    assert "fuselayers.ops.normalise.backward._backward_kernel" in _kernels()
    assert _kernels() - _launched(case for case in CASES if case.daily) == set()
