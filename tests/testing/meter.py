"""Counts the bytes that each kernel launch moves, in Triton's interpreter, and finds wrong accesses.

Masked lanes do not count, lanes of one instruction that share an address count once, and a second load counts again.
Caches are ignored, and torch's own work is not seen.

Two faults, which are silent on a GPU, are errors with kernel, argument, offset and programs in their text:

    an access out of bounds    the address is no element of the argument's tensor
    a double store             two stores to an address in a launch, through one argument or two that share memory: on a
                               GPU either may win

An atomic operation is an error too: our sums are deterministic. Pointers that come from a number, or from a tensor in
a tuple, are ignored.

Note: [tagged pointers] Two arguments may share a storage, interleaved (the halves of a packed gradient), so an address
does not identify its argument. While metered, each pointer carries the number of its argument in its upper 16 bits,
which no address uses. Arithmetic preserves them, and they are removed before each access. A block of pointers may
come from several arguments, by `tl.where`. Checked with Triton 3.6 and 3.7.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from fuselayers.ops.implementations.interpreter import patch_interpreter
from fuselayers.ops.implementations.triton_language import HAS_TRITON

__all__ = ["KernelFault", "Launch", "metered"]

_TAG: Final = np.uint64(48)
_ADDRESS: Final = np.uint64((1 << 48) - 1)

Program = tuple[int, int, int]


class KernelFault(RuntimeError):
    """A kernel accessed memory out of bounds, stored twice to one address, or used an atomic operation."""


@dataclass
class Launch:
    """One launch of a kernel: its name, the bytes that it loaded and stored, and the number of its programs."""

    kernel: str
    loaded: int = 0
    stored: int = 0
    programs: int = 0


@contextmanager
def metered() -> Iterator[list[Launch]]:
    """Meter every kernel launch in the block; yield the list of finished launches.

    Raises:
        RuntimeError: Triton does not run in its interpreter, or another meter is active.
        KernelFault: in the block, by a launch with a fault.
    """
    if not HAS_TRITON:
        raise RuntimeError("the meter needs Triton's interpreter, and Triton is not installed; pip install triton")
    import triton
    from triton.runtime import interpreter

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("the meter needs Triton's interpreter; start Python with TRITON_INTERPRET=1")
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    if hasattr(builder, "meter"):
        raise RuntimeError("a meter is active already; use its list of launches")
    patch_interpreter()
    meter = builder.meter = _Meter(interpreter.interpreter_builder)
    patches = [
        (builder, "create_masked_load", meter.load),
        (builder, "create_masked_store", meter.store),
        (builder, "create_atomic_rmw", meter.refuse),
        (builder, "create_atomic_cas", meter.refuse),
        (executor, "_init_args_hst", meter.begin),
        (executor, "__call__", meter.run),
        (interpreter, "_implicit_cvt", meter.tag),
    ]
    originals = [getattr(owner, name) for owner, name, _ in patches]
    for (owner, name, patch), original in zip(patches, originals, strict=True):
        setattr(owner, name, patch(original))
    try:
        yield meter.launches
    finally:
        for (owner, name, _), original in zip(patches, originals, strict=True):
            setattr(owner, name, original)
        del builder.meter


class _Argument:
    """A tensor argument: the places of its elements, and the program that stored to each byte of its storage."""

    def __init__(self, name: str, tensor: torch.Tensor, stores: dict[int, Any]) -> None:
        self.name, self.shape = name, list(tensor.shape)
        self.base, self.element_size = tensor.data_ptr(), tensor.element_size()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = 1 + reach if tensor.numel() else 0
        self.is_element = np.zeros(span, dtype=bool)
        if span:
            torch.from_numpy(self.is_element).as_strided(tensor.shape, tensor.stride()).fill_(True)
        # Arguments in one storage share `stored_by`. Zeros take memory only where they are written.
        storage = tensor.untyped_storage()
        self.start = self.base - storage.data_ptr()
        self.stored_by = stores.setdefault(storage.data_ptr(), np.zeros(storage.nbytes(), dtype=np.int64))


class _Meter:
    def __init__(self, builder: Any) -> None:
        self.launches: list[Launch] = []
        self._builder = builder
        self._launch = Launch("")
        self._arguments: list[_Argument] = []
        self._number_of: dict[int, int] = {}
        # By storage: for each byte 1 + program * arguments + argument of the store, or 0.
        self._stores: dict[int, Any] = {}
        self._fault: KernelFault | None = None

    def run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Run a launch and record it."""

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self._launch, self._fault = Launch(executor.fn.__name__), None
            try:
                result = original(executor, *args, **kwargs)
            except Exception:
                # The interpreter wraps every error.
                if self._fault is not None:
                    raise self._fault from None
                raise
            finally:
                self._arguments, self._number_of, self._stores = [], {}, {}
            self._launch.programs = math.prod(self._builder.grid_dim)
            self.launches.append(self._launch)
            return result

        return call

    def begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Register the launch's tensor arguments, in the interpreter's memory."""

        def init_args(executor: Any, args: Any, kwargs: Any) -> Any:
            on_host = args_on_host, kwargs_on_host = original(executor, args, kwargs)
            for name, argument in [*zip(executor.arg_names, args_on_host, strict=False), *kwargs_on_host.items()]:
                tensor = getattr(argument, "base", argument)  # of a tensor descriptor
                if isinstance(tensor, torch.Tensor):
                    self._number_of[id(tensor)] = len(self._arguments)
                    self._arguments.append(_Argument(name, tensor, self._stores))
            return on_host

        return init_args

    def tag(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Tag the pointer to a tensor argument."""

        def convert(value: Any) -> Any:
            made = original(value)
            if id(value) in self._number_of:
                made.handle.data = made.handle.data | (np.uint64(1 + self._number_of[id(value)]) << _TAG)
            return made

        return convert

    def load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Count the bytes of a load."""

        def create(builder: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
            for argument, offsets in self._touched("loads", pointers, mask.data, builder.grid_idx):
                self._launch.loaded += len(offsets) * argument.element_size
            return original(builder, _untagged(pointers), mask, *rest, **options)

        return create

    def store(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Count the bytes of a store, and mark each address with the program."""

        def create(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
            program, grid = builder.grid_idx, builder.grid_dim
            for argument, offsets in self._touched("stores to", pointers, mask.data, program, once=True):
                bytes_of = argument.start + offsets * argument.element_size
                before = argument.stored_by[bytes_of]
                if before.any():
                    place = int((before > 0).argmax())
                    number, other = divmod(int(before[place]) - 1, len(self._arguments))
                    first = _program(number, grid)
                    self._fail_twice(argument, int(offsets[place]), first, self._arguments[other], program)
                mine = _number(program, grid) * len(self._arguments) + self._arguments.index(argument)
                argument.stored_by[bytes_of] = 1 + mine
                self._launch.stored += len(offsets) * argument.element_size
            return original(builder, _untagged(pointers), value, mask, *rest, **options)

        return create

    def refuse(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Refuse an atomic operation."""

        def create(*arguments: Any, **options: Any) -> Any:
            self._fault = KernelFault(f"{self._launch.kernel} is not deterministic: it uses an atomic operation")
            raise self._fault

        return create

    def _touched(
        self, verb: str, pointers: Any, mask: Any, program: Program, *, once: bool = False
    ) -> Iterator[tuple[_Argument, Any]]:
        """The arguments behind `pointers`, each with the offsets of the accessed elements."""
        live = pointers.data[np.broadcast_to(mask, pointers.data.shape).astype(bool)]
        tags = live >> _TAG
        for tag in np.unique(tags[tags > 0]):
            argument = self._arguments[int(tag) - 1]
            addresses = (live[tags == tag] & _ADDRESS).astype(np.int64)
            offsets = (addresses - argument.base) // argument.element_size
            inside = (offsets >= 0) & (offsets < len(argument.is_element))
            inside[inside] = argument.is_element[offsets[inside]]
            if not inside.all():
                stray = int(offsets[inside.argmin()])
                self._fail(argument, stray, verb, f", which is not one of the tensor's, in program {program}")
            distinct = np.unique(offsets)
            if once and len(distinct) < len(offsets):
                ordered = np.sort(offsets)
                self._fail_twice(argument, int(ordered[1:][ordered[1:] == ordered[:-1]][0]), program, argument, program)
            yield argument, distinct

    def _fail(self, argument: _Argument, offset: int, verb: str, rest: str) -> None:
        self._fault = KernelFault(
            f"{self._launch.kernel} {verb} {argument.name} {argument.shape} at element {offset} of its memory{rest}"
        )
        raise self._fault

    def _fail_twice(self, argument: _Argument, offset: int, first: Program, other: _Argument, second: Program) -> None:
        through = "" if other is argument else f" through {other.name}"
        self._fail(argument, offset, "stores to", f" twice, in program {first}{through} and in program {second}")


def _untagged(pointers: Any) -> Any:
    return type(pointers)(pointers.data & _ADDRESS, pointers.dtype)


def _number(program: Program, grid: Program) -> int:
    return (program[0] * grid[1] + program[1]) * grid[2] + program[2]


def _program(number: int, grid: Program) -> Program:
    return number // (grid[1] * grid[2]), number // grid[2] % grid[1], number % grid[2]
