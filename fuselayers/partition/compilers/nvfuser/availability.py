"""Whether nvFuser is available, and how to get it.

nvFuser is a separate package, built against one version of torch and one of CUDA. Its newest wheel is for torch 2.9,
and this library needs a newer torch, so nvFuser has to be built from source.
"""

import importlib
from types import ModuleType
from typing import Final

import torch

_MODULE: Final = "nvfuser_direct"
# nvFuser compiles for these. Tests replace the set by one with the CPU, where they run a stand-in.
DEVICE_TYPES = frozenset({"cuda"})


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
    if device_type not in DEVICE_TYPES:
        runs_on = "a CPU" if device_type == "cpu" else device_type
        return f"nvFuser compiles for CUDA only, and this runs on {runs_on}"
    try:
        load_nvfuser()
    except Exception as error:  # the module, a symbol, a library or the driver is missing
        if isinstance(error, ModuleNotFoundError) and error.name == _MODULE:
            return f"{_MODULE} is not installed"
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{_MODULE} cannot be imported: {lines[0]}"
    return None


def nvfuser_hint() -> str:
    """Return how to make nvFuser available to this torch."""
    first = "" if torch.version.cuda else "install a CUDA build of torch, and "
    minor = ".".join(torch.__version__.split(".")[:2])
    return f"{first}build nvFuser against torch {minor}: https://github.com/NVIDIA/Fuser"
