"""`nvfuser_direct` for the tests of this folder: the stand-in, where the real one would be imported from."""

import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuselayers.partition import FallbackWarning
from fuselayers.partition.compilers.nvfuser import availability, definitions
from tests.partition.compilers.nvfuser.compare_binding import written_definition
from tests.partition.compilers.nvfuser.fusion_definition import StandIn
from tests.partition.compilers.nvfuser.library import as_on_a_gpu

__all__ = ["as_on_the_gpu", "nvfuser_stand_in", "on_the_cpu"]


@pytest.fixture
def nvfuser_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The stand-in, imported by the name of the real package; CPU tensors pretend to be on a GPU.

    Where NVFUSER_DEFINITIONS names a folder, what was defined is written there, for `compare_binding`.
    """
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "nvfuser_direct", stand_in)
    monkeypatch.setitem(sys.modules, "nvfuser_direct.pytorch_utils", stand_in.pytorch_utils)
    yield stand_in
    if "NVFUSER_DEFINITIONS" in os.environ:
        folder = Path(os.environ["NVFUSER_DEFINITIONS"])
        folder.mkdir(parents=True, exist_ok=True)
        for definition in stand_in.defined:
            written = written_definition(definition)
            (folder / f"{hashlib.sha1(written.encode()).hexdigest()}.json").write_text(written)


@pytest.fixture
def on_the_cpu(nvfuser_stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The backend on CPU tensors, run by the stand-in, with no definition made before; a region that falls back to
    torch is an error."""
    monkeypatch.setattr(availability, "_DEVICE_TYPES", {"cuda", "cpu"})
    definitions.forget_definitions()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield nvfuser_stand_in
    definitions.forget_definitions()


@pytest.fixture
def as_on_the_gpu(on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The same, with the graphs and the layouts that tensors on a GPU have: see `as_on_a_gpu`."""
    as_on_a_gpu(on_the_cpu, monkeypatch)
    return on_the_cpu
