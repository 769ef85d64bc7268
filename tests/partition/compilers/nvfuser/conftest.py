"""`nvfuser_direct` for the tests of this folder: the stand-in, where the real one would be imported from."""

import sys

import pytest

from tests.partition.compilers.nvfuser.fusion_definition import StandIn

__all__ = ["nvfuser_stand_in"]


@pytest.fixture
def nvfuser_stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, imported by the name of the real package; CPU tensors pretend to be on a GPU."""
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "nvfuser_direct", stand_in)
    monkeypatch.setitem(sys.modules, "nvfuser_direct.pytorch_utils", stand_in.pytorch_utils)
    return stand_in
