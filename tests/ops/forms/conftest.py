import gc
from collections.abc import Iterator

import pytest
import torch

from fuselayers.ops.forms import dispatch as dispatch_module
from fuselayers.ops.forms import launch as launch_module
from fuselayers.ops.forms import replay as replay_module


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where a test may define ops, whose kernels then run on the CPU, as if they were compiled."""
    for module in (replay_module, dispatch_module):
        monkeypatch.setattr(module, "INTERPRETED", True)  # the CPU has kernels then,
    monkeypatch.setattr(launch_module, "INTERPRETED", False)  # which are compiled
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of "cpu"
    with torch.library._scoped_library("fuselayers", "FRAGMENT") as library:
        monkeypatch.setattr(dispatch_module, "_library", library)
        yield


@pytest.fixture
def what_a_test_makes() -> Iterator[None]:
    """Is all that the garbage collector looks at: in a process of many tests it takes seconds to look at everything."""
    gc.freeze()
    yield
    gc.unfreeze()
