"""Whether nvFuser is available, and how to get it.

nvFuser is a separate package, built against one version of torch and one of CUDA. Its newest wheel is for torch 2.9,
and this library needs a newer torch, so nvFuser has to be built from source.
"""

import importlib
import importlib.util
import re
from types import ModuleType
from typing import Final

import torch

OLDEST_VERSION: Final = "0.2.35"
"""The oldest version of nvFuser that our definitions were built with; an older one may have other operations."""

_MODULE: Final = "nvfuser_direct"
_SOURCE: Final = "https://github.com/NVIDIA/Fuser"
# nvFuser compiles for these. The tests add the CPU, where they run a stand-in.
_DEVICE_TYPES: Final = {"cuda"}


def fused_device_types() -> frozenset[str]:
    """The device types that nvFuser compiles for."""
    return frozenset(_DEVICE_TYPES)


def load_nvfuser() -> ModuleType:
    """Import nvFuser's Python module.

    Raises:
        ImportError: it is not installed, or was built against another torch, or there is no driver.
    """
    return importlib.import_module(_MODULE)


def why_nvfuser_is_unavailable(device_type: str) -> str | None:
    """Return None if nvFuser can compile for `device_type` ("cpu", "cuda"), else what is missing.

    >>> why_nvfuser_is_unavailable("cpu")
    'nvFuser compiles for CUDA only, and this runs on a CPU'
    """
    if device_type not in fused_device_types():
        runs_on = "a CPU" if device_type == "cpu" else device_type
        return f"nvFuser compiles for CUDA only, and this runs on {runs_on}"
    try:
        module = load_nvfuser()
    except ModuleNotFoundError as error:
        if error.name == _MODULE:
            return f"{_MODULE} is not installed"
        return f"{_MODULE} cannot be imported: {_first_line(error)}"
    except Exception as error:  # of the loader: a symbol, a library or the driver is missing
        return f"{_MODULE} cannot be imported: {_first_line(error)}"
    version = str(module.version()) if hasattr(module, "version") else "unknown"
    if _numbers(version) < _numbers(OLDEST_VERSION):
        return f"{_MODULE} has version {version}, and {OLDEST_VERSION} or newer is needed"
    return None


def nvfuser_hint(*, cuda: str | None = torch.version.cuda, torch_version: str = torch.__version__) -> str:
    """Return how to make nvFuser available to this torch.

    >>> nvfuser_hint(cuda="13.0", torch_version="2.11.0+cu130")
    'no wheel is known for torch 2.11 with CUDA 13.0; build nvFuser against it: https://github.com/NVIDIA/Fuser'
    >>> nvfuser_hint(cuda=None, torch_version="2.13.0+cpu")
    'install a CUDA build of torch, and build nvFuser against it: https://github.com/NVIDIA/Fuser'
    """
    if cuda is None:
        return f"install a CUDA build of torch, and build nvFuser against it: {_SOURCE}"
    minor = ".".join(torch_version.split(".")[:2])
    return f"no wheel is known for torch {minor} with CUDA {cuda}; build nvFuser against it: {_SOURCE}"


def _numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, without the build's suffix: 0.2.36+git12ab is (0, 2, 36)."""
    return tuple(int(number) for number in re.split(r"[^\d.]", version, maxsplit=1)[0].split(".") if number)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
