"""Read the counters of driver.c."""

import ctypes
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

_DEVICES = 2
_process = ctypes.CDLL(None)
LOADED = hasattr(_process, "hollow_launches")
if LOADED:  # there is no hollow cuDNN
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass
class Counts:
    """The kernels and waits of a call by device, and the lines that waited, as far as torch reports them."""

    launches: list[int]
    waits: list[int]
    lines: list[str] = field(default_factory=list)


def _read(name: str) -> list[int]:
    return list((ctypes.c_long * _DEVICES).in_dll(_process, name))


def started() -> int:
    """The kernels, copies and fills so far."""
    return sum(_read("hollow_launches")) + sum(_read("hollow_copies"))


def counted(call: Callable[[], object]) -> Counts:
    """Run `call` and return what the driver counted meanwhile, on every thread."""
    before = _read("hollow_launches"), _read("hollow_waits")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    launches, waits = (
        [after - at_first for after, at_first in zip(_read(name), first, strict=True)]
        for name, first in zip(("hollow_launches", "hollow_waits"), before, strict=True)
    )
    lines = [f"{warning.filename}:{warning.lineno}" for warning in caught if "synchroniz" in str(warning.message)]
    return Counts(launches, waits, lines)
