import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from fuselayers.partition import BackendUnavailableError, backends, fuse
from fuselayers.partition.compilers.nvfuser import nvfuser_hint, why_nvfuser_is_unavailable


class Fails:
    """A finder that finds `nvfuser_direct`, whose import raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "nvfuser_direct" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise self.error


@pytest.fixture
def _not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nvfuser_direct", raising=False)


def test_it_is_for_cuda_only() -> None:
    assert why_nvfuser_is_unavailable("cpu") == "nvFuser compiles for CUDA only, and this runs on a CPU"
    assert why_nvfuser_is_unavailable("xpu") == "nvFuser compiles for CUDA only, and this runs on xpu"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvfuser_direct", None)  # import reads None as a missing module
    assert why_nvfuser_is_unavailable("cuda") == "nvfuser_direct is not installed"


@pytest.mark.usefixtures("_not_imported")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("libcuda.so.1: cannot open shared object file\nmore"), "libcuda.so.1: cannot open shared object"),
        (ModuleNotFoundError("No module named 'looseversion'", name="looseversion"), "No module named 'looseversion'"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_the_error_of_the_import_is_the_reason(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    monkeypatch.setattr(sys, "meta_path", [Fails(error), *sys.meta_path])
    reason = why_nvfuser_is_unavailable("cuda")
    assert reason is not None
    assert reason.startswith(f"nvfuser_direct cannot be imported: {said}")
    assert "\n" not in reason


def of_version(version: str) -> ModuleType:
    module = ModuleType("nvfuser_direct")
    module.version = lambda: version  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("version", ["0.2.34", "0.2.9+git1a2b3c4", "0.1", "of no number"])
def test_an_older_version_is_unavailable(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvfuser_direct", of_version(version))
    said = f"nvfuser_direct has version {version}, and 0.2.35 or newer is needed"
    assert why_nvfuser_is_unavailable("cuda") == said


def test_a_module_without_a_version_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvfuser_direct", ModuleType("nvfuser_direct"))
    said = "nvfuser_direct has version unknown, and 0.2.35 or newer is needed"
    assert why_nvfuser_is_unavailable("cuda") == said


@pytest.mark.parametrize("version", ["0.2.35", "0.2.36+git1a2b3c4", "0.2.100", "1.0rc1"])
def test_a_newer_version_is_available(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvfuser_direct", of_version(version))
    assert why_nvfuser_is_unavailable("cuda") is None
    status = {one.name: one for one in backends(device="cuda")}["nvfuser"]
    assert (status.available, status.hint) == (True, "")


@pytest.mark.parametrize(
    ("cuda", "version", "hint"),
    [
        (
            "13.0",
            "2.11.0+cu130",
            "no wheel is known for torch 2.11 with CUDA 13.0; build nvFuser against it: "
            "https://github.com/NVIDIA/Fuser",
        ),
        (
            None,
            "2.13.0+cpu",
            "install a CUDA build of torch, and build nvFuser against it: https://github.com/NVIDIA/Fuser",
        ),
    ],
)
def test_the_hint_names_the_missing_build_and_the_source(cuda: str | None, version: str, hint: str) -> None:
    assert nvfuser_hint(cuda=cuda, torch_version=version) == hint


def test_the_backend_says_why_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvfuser_direct", None)
    here, on_a_gpu = ({one.name: one for one in backends(device=device)}["nvfuser"] for device in ("cpu", "cuda"))
    assert (here.available, here.reason, here.hint) == (False, why_nvfuser_is_unavailable("cpu"), nvfuser_hint())
    assert (on_a_gpu.reason, on_a_gpu.hint) == ("nvfuser_direct is not installed", nvfuser_hint())
    with pytest.raises(
        BackendUnavailableError,
        match=r"^no backend could compile this function \(nvfuser: nvFuser compiles for CUDA only, and this runs on a",
    ):
        fuse(torch.sin, backend="nvfuser", fallback=())(torch.randn(3))
