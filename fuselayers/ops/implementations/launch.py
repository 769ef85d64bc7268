"""launch -- start a Triton kernel. Used by every op that has kernels.

Triton's own call binds the arguments by name and computes their specialisation, 9 to 17 us each time. Our kernels have
little specialisation (see `kernel`), so one pass over the arguments gives the cache key of a compiled kernel, which is
then called directly.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..._torch.dispatch import constant_in_dynamo
from .interpreter import INTERPRETED as INTERPRETED
from .interpreter import patch_interpreter
from .triton_language import HAS_TRITON, triton

_ALIGNMENT: Final = 16  # of an address in bytes: Triton specialises on it
ON_AMD: Final = torch.version.hip is not None
_SMALLEST_INT32: Final = -(1 << 31)
_LARGEST_INT32: Final = (1 << 31) - 1
_REGISTERS_AT_ONCE: Final = 8
_compiled: dict[tuple[Any, ...], Any] = {}
_resident: dict[Any, int] = {}
recorder: Any = None
"""Takes all launches in place of a GPU. In a checkout, `benchmarks.lint_kernels.record` sets it."""


class Processor(NamedTuple):
    """The resources of one processor (NVIDIA: SM, AMD: CU), which its programs share.

    Attributes:
        registers: the number of 32-bit registers.
        shared: bytes of shared memory.
        reserved: bytes of shared memory that every program takes in addition to what it asks for.
        threads: the most threads at a time.
    """

    registers: int
    shared: int
    reserved: int
    threads: int = 2048

    def resident(self, *, registers: int, shared: int, threads: int) -> int:
        """Return how many programs run at a time: `registers` for each thread, `shared` bytes for each program.

        >>> NVIDIA.resident(registers=164, shared=24_644, threads=256)
        1
        """
        rounded = -(-max(registers, 1) // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
        by_shared = self.shared // max(shared + self.reserved, 1)
        return max(1, min(self.registers // (rounded * threads), by_shared, self.threads // threads))


NVIDIA: Final = Processor(registers=1 << 16, shared=228 << 10, reserved=1 << 10)
"""Compute capability 9.0 and 10.0."""
AMD: Final = Processor(registers=1 << 17, shared=64 << 10, reserved=0)
"""CDNA 2 and 3."""


def kernel(fn: Callable[..., Any]) -> Any:
    """Decorate a Triton kernel; no numeric argument is specialised on.

    By default Triton compiles separate kernels for a 1 and for multiples of 16. A constant tells our kernels that a
    width is a multiple of 8, as wide loads and stores require (see `rows`). In profilers the name has the op's name in
    front: `_forward_kernel` of gated_activation is `gated_activation_forward_kernel`.
    """
    constants = {name for name, kind in fn.__annotations__.items() if "constexpr" in str(kind)}
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    numbers = [name for name in names if name not in constants and not name.endswith("_ptr")]
    op, own = fn.__module__.partition(".ops.")[2].partition(".")[0], fn.__name__.lstrip("_")
    name = own if own.startswith(op) else f"{op}_{own}"
    return triton.jit(fn, do_not_specialize=numbers, repr=lambda _: name)


def launch(
    function: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    *,
    num_warps: int = 4,
    persistent_warps: int | None = None,
) -> int:
    """Run a kernel on the device of its tensors, and return the number of its programs in x.

    Args:
        function: a function decorated with `kernel`.
        grid: programs in x, and in y and z.
        arguments: its run-time arguments in order: tensors, None for an absent tensor, numbers. The first determines
            the device.
        constants: its compile-time constants in order, after the arguments.
        num_warps: warps per program.
        persistent_warps: the most warps per processor, up to 64, of a kernel whose programs take one tile after the
            other. The grid then counts the tiles in x, and only as many programs start as the device runs at a time:
            more would run after the others, on a device that is nearly idle. None starts the whole grid.
    """
    if recorder is not None:
        recorded: int = recorder(function, grid, arguments, constants, num_warps, persistent_warps)
        return recorded
    device = arguments[0].device
    if INTERPRETED:
        if persistent_warps is not None:
            grid = persistent_grid(grid, num_processors(device))
        patch_interpreter()
        function[grid](*arguments, *constants)
        return grid[0]
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(function, grid, arguments, constants, num_warps=num_warps, persistent_warps=persistent_warps)
    key = (id(function), device, num_warps, constants, *map(_kind, arguments))
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = function.warmup(*arguments, *constants, grid=(1,), num_warps=num_warps)
    if persistent_warps is not None:
        resident = _resident.get(compiled)
        if resident is None:
            resident = _resident[compiled] = _resident_programs(compiled, device, num_warps)
        grid = persistent_grid(grid, num_processors(device) * min(resident, most_resident(num_warps, persistent_warps)))
    compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
    return grid[0]


def most_programs(grid: tuple[int, ...], device: torch.device, *, num_warps: int = 4, persistent_warps: int) -> int:
    """Return the most programs in x that `launch` starts of a persistent kernel: the rows of a buffer of their sums."""
    return persistent_grid(grid, num_processors(device) * most_resident(num_warps, persistent_warps))[0]


def most_resident(num_warps: int, persistent_warps: int) -> int:
    return max(persistent_warps // num_warps, 1)


def persistent_grid(grid: tuple[int, ...], at_a_time: int) -> tuple[int, ...]:
    num_tiles, *side_by_side = grid
    return max(1, min(num_tiles, at_a_time // math.prod(side_by_side))), *side_by_side


def _resident_programs(compiled: Any, device: torch.device, num_warps: int) -> int:
    compiled[1, 1, 1]  # loads the code, and with it the number of registers
    properties = _properties(device)
    processor = (AMD if ON_AMD else NVIDIA)._replace(threads=properties.max_threads_per_multi_processor)
    if not ON_AMD:
        processor = processor._replace(shared=properties.shared_memory_per_multiprocessor)
    threads = num_warps * properties.warp_size
    return processor.resident(registers=compiled.n_regs, shared=compiled.metadata.shared, threads=threads)


def _kind(argument: Any) -> Any:
    """Return what Triton specialises on: a tensor's dtype and alignment, an absent tensor, an integer's width."""
    if isinstance(argument, Tensor):
        aligned = not argument.data_ptr() % _ALIGNMENT
        small = not ON_AMD or argument.untyped_storage().nbytes() < 1 << 31
        return argument.dtype if aligned and small else (argument.dtype, aligned, small)
    return argument is None or not _SMALLEST_INT32 <= argument <= _LARGEST_INT32


def num_processors(device: torch.device) -> int:
    """Return the number of processors of a device; two in Triton's interpreter."""
    if device.type == "meta":
        assert recorder is not None, "nothing runs on meta tensors: record the launches"
        return int(recorder.processors)
    return 2 if INTERPRETED else int(_properties(device).multi_processor_count)


@functools.cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


@constant_in_dynamo
def shared_memory(device: torch.device) -> int:
    """Return the most bytes of shared memory that a program may have; without a GPU, those on an H100."""
    return _shared_memory(device)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if INTERPRETED or device.type != "cuda" or not torch.cuda.is_available():
        return NVIDIA.shared - NVIDIA.reserved
    if ON_AMD:
        return AMD.shared - AMD.reserved
    return int(_properties(device).shared_memory_per_multiprocessor) - NVIDIA.reserved


def why_no_kernels(device: torch.device) -> str | None:
    """Return None if Triton's kernels run on `device`, else what is missing."""
    if not HAS_TRITON:
        return "Triton is not installed; on Linux: pip install triton"
    if INTERPRETED or (device.type == "meta" and recorder is not None):
        return None
    if device.type != "cuda":
        return (
            f"Triton has no compiler for {device.type}; move the tensors to a GPU, or set TRITON_INTERPRET=1 to debug"
        )
    return None
