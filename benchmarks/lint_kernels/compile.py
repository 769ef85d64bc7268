"""Compiles a kernel for any GPU, without one, with the compilers that come with Triton."""

import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from benchmarks.lint_kernels.assembly import Code, read_amdgcn, read_sass
from benchmarks.lint_kernels.record import Launch
from fuselayers.ops.implementations.launch import AMD, INTERPRETED, NVIDIA, Processor
from fuselayers.ops.implementations.triton_language import HAS_TRITON, triton
from fuselayers.partition import BackendUnavailableError


class Chip(NamedTuple):
    """A GPU to compile for.

    Attributes:
        target: Triton's backend and its architecture, and the threads of a warp.
        processors: how many.
        processor: the resources of each.
    """

    target: tuple[str, int | str, int]
    processors: int
    processor: Processor


CHIPS: Final[Mapping[str, Chip]] = MappingProxyType(
    {
        # A100 of 80 GB, H200 (its code is the H100's too), B200, MI300X.
        "sm_80": Chip(("cuda", 80, 32), 108, NVIDIA._replace(shared=164 << 10)),
        "sm_90": Chip(("cuda", 90, 32), 132, NVIDIA),
        "sm_100": Chip(("cuda", 100, 32), 148, NVIDIA),
        "gfx942": Chip(("hip", "gfx942", 64), 304, AMD),
    }
)
_known: dict[tuple[Any, ...], tuple[Code, int]] = {}


def check_compilers() -> None:
    """Raise unless kernels can be compiled on this machine.

    Raises:
        BackendUnavailableError: Triton, or one of its tools, is missing.
        ValueError: Triton interprets kernels.
    """
    if not HAS_TRITON:
        raise BackendUnavailableError("kernels are compiled with Triton, which is missing; pip install triton")
    if INTERPRETED:
        raise ValueError("kernels cannot be compiled where Triton interprets them; unset TRITON_INTERPRET")
    for tool in ("ptxas", "ptxas_blackwell", "cuobjdump"):
        try:
            getattr(triton.knobs.nvidia, tool)
        except RuntimeError as error:
            raise BackendUnavailableError(
                f"{error}; it comes with Triton's wheel on PyPI: pip install --force-reinstall triton"
            ) from error


def compiler() -> str:
    """The versions of Triton and of its assembler, on which figures depend.

    >>> compiler()  # doctest: +SKIP
    'Triton 3.7.1, ptxas 12.9'
    """
    return f"Triton {triton.__version__}, ptxas {triton.knobs.nvidia.ptxas.version}"


def warps_of(launch: Launch, arch: str) -> int:
    """The warps of one program, which has 1024 threads at most."""
    return min(launch.num_warps, 1024 // CHIPS[arch].target[2])


def threads_of(launch: Launch, arch: str) -> int:
    """The threads of one program."""
    return warps_of(launch, arch) * CHIPS[arch].target[2]


def kind_of(launch: Launch) -> tuple[Any, ...]:
    """A key of the code of a launch; launches with equal keys run the same code."""
    arguments = (
        getattr(argument, "dtype", argument if isinstance(argument, torch.dtype) else type(argument))
        for argument in launch.arguments
    )
    return launch.function, launch.constants, launch.num_warps, *arguments


def resident(launch: Launch, arch: str) -> int:
    """How many programs of a launch one processor runs at a time."""
    code, shared = compile_for(launch, arch)
    return CHIPS[arch].processor.resident(registers=code.registers, shared=shared, threads=threads_of(launch, arch))


def compile_for(launch: Launch, arch: str) -> tuple[Code, int]:
    """Compile the kernel of a launch as the launch would; return its code and its bytes of shared memory.

    Triton's cache is a temporary folder, so no cached code is used and no file stays. Code is compiled once a process.
    """
    key = arch, *kind_of(launch)
    if key not in _known:
        _known[key] = _compiled(launch, arch)
    return _known[key]


def _compiled(launch: Launch, arch: str) -> tuple[Code, int]:
    with tempfile.TemporaryDirectory(prefix="fuselayers-lint-") as folder, _target(arch, cache=folder):
        compiled = launch.function.warmup(
            *launch.arguments, *launch.constants, grid=launch.grid, num_warps=warps_of(launch, arch)
        )
        if "amdgcn" in compiled.asm:
            return read_amdgcn(compiled.asm["amdgcn"]), compiled.metadata.shared
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", str(cubin)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return read_sass(printed), compiled.metadata.shared


class _Driver:
    """Answers what Triton asks a GPU when it compiles."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> Any:
        # Kernels cache compiled code by device; a number could be that of a real GPU.
        return self.target

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


@contextmanager
def _target(arch: str, *, cache: str) -> Iterator[None]:
    from triton.backends.compiler import GPUTarget

    driver = triton.runtime.driver
    before = driver._active  # `active` would look for a GPU
    driver.set_active(_Driver(GPUTarget(*CHIPS[arch].target)))
    try:
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = cache
            yield
    finally:
        driver._active = before
