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
        for name, value in vars(import_module(module.name)).items():
            if name.endswith("_kernel") and getattr(value, "__module__", "") == module.name:
                names.add(f"{module.name}.{name}")
    return names


def _launched(cases: Iterable[Case]) -> set[str]:
    return {f"{launch.function.module}.{launch.function.__name__}" for case in cases for launch in launches_of(case)}


@compiles
@pytest.mark.slow
def test_every_kernel_is_compiled_every_day() -> None:
    assert "fuselayers.ops.normalise.backward._sums_split_kernel" in _kernels()
    assert _kernels() - _launched(case for case in CASES if case.daily) == set()


@compiles
def test_a_case_launches_what_a_call_on_a_gpu_would() -> None:
    (case,) = (case for case in CASES if case.title == "bias_activation_dropout gelu 4096 bfloat16")
    forward, *_ = launches_of(case)
    assert forward.grid == (4096, 2, 1)  # 8192 rows in tiles of 2 x 2048
    assert forward.constants == ("gelu", False, 8, 2, 2048)
    assert [None if tensor is None else tuple(tensor.shape) for tensor in forward.arguments[:5]] == [
        (8192, 4096),
        None,
        (4096,),
        (8192, 4096),
        (),
    ]
