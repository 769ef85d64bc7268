import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuselayers._torch.dispatch import FakeTensorMode
from fuselayers.partition.vector_math import VECTOR_FUNCTIONS, call_vector_functions
from tests.processes import run

HAS_MKL = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tensor]]:
    """What was called, and on what."""
    calls: list[tuple[str, Tensor]] = []
    for name in VECTOR_FUNCTIONS:
        monkeypatch.setattr(torch, name, lambda x, name=name: calls.append((name, x)))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    return calls


def test_they_are_those_that_torch_hands_to_mkl() -> None:
    header = (Path(torch.__file__).parent / "include/ATen/cpu/vml.h").read_text()
    names = re.findall(r"^IMPLEMENT_VML_MKL\((\w+), \w+\)$", header, re.MULTILINE)
    assert sorted(names) == sorted(VECTOR_FUNCTIONS)


def test_it_is_called_also_where_nothing_runs_for_real(called: list[tuple[str, Tensor]]) -> None:
    with torch.device("meta"), FakeTensorMode():
        call_vector_functions()
    assert len(called) == 2 * len(VECTOR_FUNCTIONS)
    assert {(type(x), x.device.type) for _, x in called} == {(Tensor, "cpu")}


def test_without_mkl_there_is_nothing_to_call(
    called: list[tuple[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    call_vector_functions()
    assert called == []


@pytest.mark.skipif(not HAS_MKL, reason="torch was built without MKL")
def test_importing_the_package_calls_them() -> None:
    # In a process that has imported nothing but the package, which therefore has to have imported the module.
    program = """
import importlib, sys, torch
plain, called = torch.erfinv, []
torch.erfinv = lambda x: called.append(x.dtype) or plain(x)
importlib.reload(sys.modules["fuselayers.partition.vector_math"])
print(called)
"""
    done = run(program)
    assert (done.printed, done.errors) == ("[torch.float32, torch.float64]\n", "")
