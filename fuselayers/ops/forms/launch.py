"""launch -- start a Triton kernel with as little Python in the way as can be. Used by every op that has kernels.

Triton's own call binds the arguments by name and works out what each is specialised on, every time. Our kernels are
specialised on little, and say so (see `kernel`), so that the key of a compiled kernel is made in one pass over the
arguments and the kernel is called directly. What comes more than once does not come here at all, see `replay`.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..._torch.dispatch import AsOnGPU, disable_current_modes
from .interpreter import INTERPRETED as INTERPRETED
from .interpreter import mend_interpreter
from .replay import ALIGNMENT, ON_AMD, has_short_offsets
from .triton_language import HAS_TRITON, triton
from .writer import writer

__all__ = ["INTERPRETED", "Launch", "kernel", "launch", "num_processors", "recorded_launches", "why_no_kernels"]

_SMALLEST_INT32: Final = -(1 << 31)
_LARGEST_INT32: Final = (1 << 31) - 1
_PROCESSORS_OF_AN_H200: Final = 132
_compiled: dict[tuple[Any, ...], Any] = {}
_recorded: "list[Launch] | None" = None


class Launch(NamedTuple):
    """The arguments of one call of `launch`."""

    function: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]
    num_warps: int
    num_stages: int | None = None


def kernel(fn: Callable[..., Any]) -> Any:
    """Decorate a Triton kernel whose numbers are all plain numbers at run time.

    Triton would compile it again for a 1 and for a multiple of 16. That a width is a multiple of 8, which is what wide
    loads and stores need to know, our kernels are told by a constant (see `rows`). Profilers call it after its op:
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
        function: what `kernel` returned.
        grid: programs in x, and in y.
        arguments: its run-time arguments in order: tensors, None for a tensor that is not there, numbers.
        constants: its constants in order, which come after them.
        num_warps: per program.
        num_stages: how many steps of a matmul's loop are on their way at a time; None leaves it to Triton.
    """
    one = Launch(function, grid, arguments, constants, num_warps, num_stages)
    if _recorded is not None:
        _recorded.append(one)
        return
    wrote = writer()
    if wrote is None:
        _start(one)
        return
    with disable_current_modes():  # what the interpreter calls of torch is not the op's
        start = _start(one)
    wrote.launched(start, (*arguments, *constants))


def _start(one: Launch) -> Callable[..., Any]:
    """Run a kernel, and return what runs it again with other tensors of the same kinds."""
    if INTERPRETED:
        mend_interpreter()
        start: Callable[..., Any] = one.function[one.grid]
        start(*one.arguments, *one.constants)
        return start
    device = next(given.device for given in one.arguments if isinstance(given, Tensor))
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _start_compiled(one, device.index)
    return _start_compiled(one, device.index)


def _start_compiled(made: Launch, device_index: int) -> Callable[..., Any]:
    function, grid, arguments, constants, num_warps, num_stages = made
    # What Triton compiles anew for: a tensor's dtype and alignment, an integer's width, that there is no tensor.
    kinds = [
        (one.dtype, one.data_ptr() % ALIGNMENT == 0, ON_AMD and has_short_offsets(one))
        if isinstance(one, Tensor)
        else one is None or (one.__class__ is int and not _SMALLEST_INT32 <= one <= _LARGEST_INT32)
        for one in arguments
    ]
    key = (id(function), device_index, num_warps, num_stages, constants, *kinds)
    compiled = _compiled.get(key)
    whole_grid = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    if compiled is None:
        stages = {} if num_stages is None else {"num_stages": num_stages}
        compiled = _compiled[key] = function[grid](*arguments, *constants, num_warps=num_warps, **stages)
        return compiled[whole_grid]  # type: ignore[no-any-return]
    start: Callable[..., Any] = compiled[whole_grid]
    start(*arguments, *constants)
    return start


@functools.cache
def num_processors(device: torch.device) -> int:
    """How many programs of a persistent kernel a device runs side by side; two where they are interpreted."""
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
    """Collect the launches of ops on meta tensors, as they would be on an H200, and make none of them.

    The ops have to be asked for their kernels, with backend="triton". Used by `fuselayers lint-kernels`.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        with AsOnGPU("fuselayers"):
            yield _recorded
    finally:
        _recorded = before
