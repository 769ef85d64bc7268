"""The device and the machine of a measurement; the commands print them beside their numbers."""

import ctypes
import platform
from typing import Final

import torch

from ..names import shown
from ..partition.choose.machine import processor_name

# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3


def choose_device(name: str, *, setting: str) -> torch.device:
    """Return the device that a setting names; "auto" is a GPU if torch can use one, else the CPU.

    Args:
        name: auto, or as torch names devices.
        setting: the name of the setting, for the error.

    Raises:
        ValueError: torch cannot use such a device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("nothing runs on it")
        torch.empty(0, device=device)
    except Exception as error:  # its type depends on the device; some raise an ImportError
        usable = ", ".join(["auto", "cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))])
        raise ValueError(
            f"{setting} must be auto, cpu or a GPU that torch can use, got {shown(name)}; here there are: {usable}"
        ) from error
    return device


def describe_machine(device: torch.device) -> str:
    """One line: the processor, the vector instructions that torch uses, the threads, the versions."""
    on_a_cpu = f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}"
    where = on_a_cpu if device.type == "cpu" else torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    count = f"{threads} thread{'' if threads == 1 else 's'}"
    return f"{where}, {count}, torch {torch.__version__}, Python {platform.python_version()}"


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory, for the rest of this process; return False where it cannot.

    Otherwise glibc returns large blocks to the system, depending on the rest of the heap. New pages make a call on a
    CPU up to ten times as long, and it is random which candidate pays for them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not Linux, or a C library without it
        return False
    return all(mallopt(parameter, (1 << 31) - 1) for parameter in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))


def measured_machine(device: torch.device) -> str:
    """Prepare this process for measurements, and describe the machine."""
    kept = device.type == "cpu" and keep_freed_memory()
    return describe_machine(device) + (", freed memory kept" if kept else "")
