"""Whether nvFuser can serve here, and how to get it if not.

nvFuser is a package of its own, built against one version of torch and one of CUDA. Its wheels lag behind torch's.
"""

import importlib
import importlib.util
from types import ModuleType
from typing import Final

import torch

__all__ = ["KNOWN_WHEELS", "fused_device_types", "load_nvfuser", "nvfuser_hint", "why_nvfuser_is_unavailable"]

KNOWN_WHEELS: Final = frozenset({("12.8", "2.9")})
"""The versions of CUDA and torch for which a wheel with `nvfuser_direct` is known."""

_MODULE: Final = "nvfuser_direct"
_SOURCE: Final = "https://github.com/NVIDIA/Fuser"
# What nvFuser generates code for. The tests add the CPU, on which they run a stand-in for it.
_DEVICE_TYPES: Final = {"cuda"}


def fused_device_types() -> frozenset[str]:
    """The types of devices whose tensors nvFuser takes."""
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
        load_nvfuser()
    except ModuleNotFoundError as error:
        if error.name == _MODULE:
            return f"{_MODULE} is not installed"
        return f"{_MODULE} cannot be imported: {_first_line(error)}"
    except Exception as error:  # the loader's own words: a symbol or a library that is missing, or the driver
        return f"{_MODULE} cannot be imported: {_first_line(error)}"
    return None


def nvfuser_hint(*, cuda: str | None = torch.version.cuda, torch_version: str = torch.__version__) -> str:
    """Return the command that would make nvFuser available to this torch.

    >>> nvfuser_hint(cuda="12.8", torch_version="2.9.1+cu128")
    'pip install nvfuser-cu128-torch29'
    >>> nvfuser_hint(cuda=None, torch_version="2.13.0+cpu")
    'install a CUDA build of torch, and build nvFuser against it: https://github.com/NVIDIA/Fuser'
    """
    if cuda is None:
        return f"install a CUDA build of torch, and build nvFuser against it: {_SOURCE}"
    minor = ".".join(torch_version.split(".")[:2])
    if (cuda, minor) in KNOWN_WHEELS:
        return f"pip install nvfuser-cu{cuda.replace('.', '')}-torch{minor.replace('.', '')}"
    return f"no wheel is known for torch {minor} with CUDA {cuda}; build nvFuser against it: {_SOURCE}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
