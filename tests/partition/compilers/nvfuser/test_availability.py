import sys
from unittest.mock import Mock

import pytest
import torch

from fuselayers.partition import BackendStatus, backends
from fuselayers.partition.compilers.nvfuser import availability

ON_A_CPU = "nvFuser compiles for CUDA only, and this runs on a CPU"


def status(device: str) -> BackendStatus:
    return {backend.name: backend for backend in backends(device=device)}["nvfuser"]


def test_a_missing_package_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvfuser_direct", None)  # import reads None as a missing module
    assert status("cpu").reason == ON_A_CPU
    missing = status("cuda")
    assert (missing.available, missing.reason) == (False, "nvfuser_direct is not installed")
    version = ".".join(torch.__version__.split(".")[:2])
    assert missing.hint.endswith(f"build nvFuser against torch {version}: https://github.com/NVIDIA/Fuser")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("libcuda.so.1: cannot open shared object file\nmore"), "libcuda.so.1: cannot open shared object"),
        (ModuleNotFoundError("No module named 'looseversion'", name="looseversion"), "No module named 'looseversion'"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_the_error_of_the_import_is_the_reason(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    monkeypatch.setattr(availability, "load_nvfuser", Mock(side_effect=error))
    reason = status("cuda").reason
    assert reason.startswith(f"nvfuser_direct cannot be imported: {said}")
    assert "\n" not in reason
