"""The nvFuser backend on CPU tensors, with a stand-in for `nvfuser_direct`."""

import hashlib
import os
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuselayers.partition import FallbackWarning
from fuselayers.partition.compilers.nvfuser import availability, definitions
from tests.partition.compilers.nvfuser.interpreter import StandIn


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The backend takes CPU tensors and starts with no definitions; a region that falls back to torch is an error.

    Where NVFUSER_DEFINITIONS names a folder, the definitions are written there, for `build_definitions`.
    """
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "nvfuser_direct", stand_in)
    monkeypatch.setattr(availability, "DEVICE_TYPES", {"cuda", "cpu"})
    monkeypatch.setattr(definitions, "_definitions", weakref.WeakValueDictionary())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield stand_in
    if "NVFUSER_DEFINITIONS" in os.environ:
        folder = Path(os.environ["NVFUSER_DEFINITIONS"])
        folder.mkdir(parents=True, exist_ok=True)
        for definition in stand_in.defined:
            script = definition.script()
            (folder / f"{hashlib.sha1(script.encode()).hexdigest()}.py").write_text(script)
