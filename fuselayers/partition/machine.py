"""Machine -- how fast memory, arithmetic and launches are, so that costs can be compared in bytes moved.

A machine that `fuselayers tune` has measured is read from one JSON file; the default is the figures below.
"""

import functools
import json
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch


@dataclass(frozen=True)
class Machine:
    """The speeds of a machine.

    Args:
        name: the source of the figures.
        bandwidth: bytes per second to and from memory, streaming.
        flop_rate: floating point operations per second of a float32 matmul.
        low_precision_flop_rate: the same in bfloat16 or float16.
        vector_flop_rate: the same for elementwise ops, which never see a matrix unit.
        kernel_seconds: the least time of one more kernel.
    """

    name: str
    bandwidth: float
    flop_rate: float
    low_precision_flop_rate: float
    vector_flop_rate: float
    kernel_seconds: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and (isinstance(value, bool) or not 0 < value <= sys.float_info.max):
                raise ValueError(f"{field.name} of a machine must be a finite number above 0, got {value}")

    def bytes_of_flops(self, flops: float, *, itemsize: int) -> float:
        """The bytes that could be moved while a matmul does so many FLOPs on elements of `itemsize` bytes."""
        rate = self.flop_rate if itemsize >= 4 else self.low_precision_flop_rate
        return flops * self.bandwidth / rate

    @property
    def bytes_of_kernel(self) -> float:
        """The bytes that could be moved while one more kernel is launched."""
        return self.kernel_seconds * self.bandwidth


# CPU: 2 cores of an AMD EPYC with AVX-512, as `fuselayers tune` measured it. CUDA: the H200's data sheet, launches as
# measured for Triton kernels; the decisions depend on ratios, which differ little between the GPUs of a generation.
_STATED: Final[Mapping[str, Machine]] = MappingProxyType(
    {
        "cpu": Machine("stated: two cores with AVX-512", 2.0e10, 2.0e11, 2.0e11, 1.0e11, 2e-6),
        "cuda": Machine("stated: NVIDIA H200", 4.8e12, 6.7e13, 9.9e14, 6.7e13, 4e-6),
    }
)


def machine_of(device_type: str) -> Machine:
    """Return the machine that `fuselayers tune` measured for "cpu" or "cuda", or else the stated one.

    An unknown kind of device counts as a GPU.

    >>> machine_of("cpu").bandwidth > 0
    True
    """
    try:
        path = tuned_file()
        tuned = _read_tuned(path, path.stat().st_mtime_ns)
    except (OSError, RuntimeError):  # no such file, no permission, or no home folder
        tuned = {}
    return tuned.get(_key(device_type)) or _STATED.get(device_type) or _STATED["cuda"]


def tuned_file() -> Path:
    """Return the file of measured machines: in FUSELAYERS_CACHE, or in XDG_CACHE_HOME/fuselayers.

    Raises:
        RuntimeError: neither is set, and the user has no home.
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
            f"{path} is no file as fuselayers writes it ({error}); it is not used, and `fuselayers tune` replaces it",
            stacklevel=3,
        )
        return {}
