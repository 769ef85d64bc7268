"""launch -- start a Triton kernel. Used by every op that has kernels.

Triton's own call binds the arguments by name and computes their specialisation, 9 to 17 us each time. Our kernels have
little specialisation (see `kernel`), so one pass over the arguments gives the cache key of a compiled kernel, which is
then called directly.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..._torch.dispatch import AsOnGPU
from .interpreter import INTERPRETED as INTERPRETED
from .interpreter import patch_interpreter
from .triton_language import HAS_TRITON, triton

_ALIGNMENT: Final = 16  # of an address in bytes: Triton specialises on it
_ON_AMD: Final = torch.version.hip is not None
_SMALLEST_INT32: Final = -(1 << 31)
_LARGEST_INT32: Final = (1 << 31) - 1
_PROCESSORS_OF_AN_H200: Final = 132
_compiled: dict[tuple[Any, ...], Any] = {}
_recorded: "list[Launch] | None" = None
_stub: Callable[..., None] | None = None


class Launch(NamedTuple):
    """The arguments of one call of `launch`."""

    function: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]
    num_warps: int
    num_stages: int | None = None


def kernel(fn: Callable[..., Any]) -> Any:
    """Decorate a Triton kernel; no numeric argument is specialised on.

    By default Triton compiles another kernel for a 1 and for a multiple of 16. A constant tells our kernels that a
    width is a multiple of 8, as wide loads and stores require (see `rows`). Profilers show the name of its op:
    `_forward_kernel` of softmax is `softmax_forward_kernel`.
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
    num_stages: int | None = None,
) -> None:
    """Run a kernel on the device of its tensors.

    Args:
        function: a function decorated with `kernel`.
        grid: programs in x, and in y and z.
        arguments: its run-time arguments in order: tensors, None for an absent tensor, numbers. The first determines
            the device.
        constants: its compile-time constants in order, after the arguments.
        num_warps: warps per program.
        num_stages: pipeline stages of a matmul's loop; None for Triton's default.
    """
    if _recorded is not None:
        # Detached aliases, so that a record keeps no autograd graph alive.
        aliases = tuple(one.detach() if isinstance(one, Tensor) else one for one in arguments)
        _recorded.append(Launch(function, grid, aliases, constants, num_warps, num_stages))
        return
    if INTERPRETED and _stub is None:
        patch_interpreter()
        function[grid](*arguments, *constants)
        return
    device = arguments[0].device
    # Triton specialises on a tensor's dtype and alignment, an absent tensor, an integer's width.
    kinds = [
        (one.dtype, not one.data_ptr() % _ALIGNMENT, _ON_AMD and one.untyped_storage().nbytes() < 1 << 31)
        if isinstance(one, Tensor)
        else one is None or not _SMALLEST_INT32 <= one <= _LARGEST_INT32
        for one in arguments
    ]
    key = (id(function), device, num_warps, num_stages, constants, *kinds)
    compiled = _compiled.get(key)
    if device.index is None or device.index == torch.cuda.current_device():
        _start(compiled, key, function, grid, arguments)
    else:
        with torch.cuda.device(device):
            _start(compiled, key, function, grid, arguments)


def _start(
    compiled: Any, key: tuple[Any, ...], function: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]
) -> None:
    _, _, num_warps, num_stages, constants, *_ = key
    if _stub is not None:
        _stub(*arguments, *constants)
    elif compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
    else:
        stages = {} if num_stages is None else {"num_stages": num_stages}
        _compiled[key] = function[grid](*arguments, *constants, num_warps=num_warps, **stages)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of processors of a device; two in Triton's interpreter."""
    if device.type == "meta":
        return _PROCESSORS_OF_AN_H200
    if INTERPRETED:
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def why_no_kernels(device: torch.device) -> str | None:
    """Return None if Triton's kernels run on `device`, else what is missing."""
    if not HAS_TRITON:
        return "Triton is not installed; on Linux: pip install triton"
    if INTERPRETED or (device.type == "meta" and _recorded is not None):
        return None
    if device.type != "cuda":
        return (
            f"Triton has no compiler for {device.type}; move the tensors to a GPU, or set TRITON_INTERPRET=1 to debug"
        )
    return None


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record the launches of ops on meta tensors, as on an H200, and run none of them.

    The ops must be called with backend="triton". Used by `fuselayers lint-kernels`.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        with AsOnGPU("fuselayers"):
            yield _recorded
    finally:
        _recorded = before


@contextmanager
def stubbed_launches() -> Iterator[None]:
    """Make every launch return at once, to measure the Python time of a call. Used by `bench op --overhead`."""
    global _stub
    before, _stub = _stub, lambda *_: None
    try:
        yield
    finally:
        _stub = before
