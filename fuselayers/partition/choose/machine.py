"""machine -- the machine whose speeds set the prices: measured by `fuselayers tune`, or with the figures below."""

import functools
import json
import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from ...hardware import GPUS, Machine

# CPU: 2 cores of an AMD EPYC with AVX-512, as `fuselayers tune` measured it. CUDA: the decisions depend on ratios,
# which differ little between the GPUs of a generation.
_STATED: Final[Mapping[str, Machine]] = MappingProxyType(
    {
        "cpu": Machine("stated: two cores with AVX-512", 2.0e10, 2.0e11, 2.0e11, 1.0e11, 2e-6),
        "cuda": replace(GPUS["H200"], name="stated: NVIDIA H200"),
    }
)


def machine_of(device_type: str) -> Machine:
    """Return the machine that `fuselayers tune` measured for "cpu" or "cuda", or else the stated one.

    An unknown device type counts as a GPU.

    >>> machine_of("cpu").bandwidth > 0
    True
    """
    return _tuned().get(_key(device_type)) or _STATED.get(device_type) or _STATED["cuda"]


def named_with_file(machine: Machine) -> str:
    """Return the name of a machine; of one that `fuselayers tune` measured, with the file that holds it.

    Reports name the file, since it changes the cut, and with it the last bits of results.
    """
    return f"{machine.name}, from {tuned_file()}" if machine in _tuned().values() else machine.name


def _tuned() -> Mapping[str, Machine]:
    try:
        path = tuned_file()
        return _read_tuned(path, path.stat().st_mtime_ns)
    except (OSError, RuntimeError):  # no such file, no permission, or no home folder
        return {}


def tuned_file() -> Path:
    """Return the file of measured machines: in FUSELAYERS_CACHE, or in XDG_CACHE_HOME/fuselayers.

    Raises:
        RuntimeError: neither is set, and the user has no home folder.
    """
    own = os.environ.get("FUSELAYERS_CACHE")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fuselayers"
    return folder / "machines.json"


@functools.cache
def processor_name() -> str:
    """Return the name of this machine's processor. Used beside every measurement."""
    # platform.processor() is empty on most Linux systems.
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_tuned(device_type: str, machine: Machine) -> Path:
    """Store a measured machine for `machine_of`, next to those of other devices; return the file.

    A file that cannot be read is replaced.
    """
    path = tuned_file()
    known = dict(_read_tuned(path, path.stat().st_mtime_ns)) if path.exists() else {}
    known[_key(device_type)] = machine
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader finds the old content or the new.
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps({key: asdict(value) for key, value in known.items()}, indent=2) + "\n")
    os.replace(beside, path)
    return path


def _key(device_type: str) -> str:
    """Return the key of a device; a CPU's has its number of threads, which decides its speed."""
    if device_type == "cuda" and torch.cuda.is_available():
        return f"cuda: {torch.cuda.get_device_name()}"
    if device_type == "cpu":
        return f"cpu: {torch.get_num_threads()} threads"
    return device_type


@functools.lru_cache(maxsize=4)
def _read_tuned(path: Path, _modified: int) -> Mapping[str, Machine]:
    try:
        return {key: Machine(**value) for key, value in json.loads(path.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(
            f"{path} was not written by fuselayers ({error}); it is not used, and `fuselayers tune` replaces it",
            stacklevel=3,
        )
        return {}
