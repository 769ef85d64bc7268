import sys
from pathlib import Path

import pytest
import torch

from fuselayers.partition import BackendStatus, backends

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
    ("code", "said"),
    [
        ("raise ImportError('libcuda.so.1: cannot open\\nmore')", "libcuda.so.1: cannot open"),
        ("import a_package_that_is_missing", "No module named 'a_package_that_is_missing'"),
        ("raise RuntimeError", "RuntimeError"),
    ],
)
def test_the_error_of_the_import_is_the_reason(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvfuser_direct.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert status("cuda").reason == f"nvfuser_direct cannot be imported: {said}"
