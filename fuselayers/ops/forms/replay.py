"""replay -- what an op's kernel form did for one call, done again for calls like it with as little Python as can be.

To launch a kernel, Python works out tiles, strides, a grid and what the kernel is compiled for. All of that follows
from the layouts of the tensors and from the options. So when a kind of call comes a second time, what is done is
written down as straight-line Python: the tensors that are made, the launches, and torch's own ops between them. Calls
of that kind run it from then on.

    def replay(a0, a1, a2):
        t0 = empty_strided((8, 256, 512), (131072, 512, 1), bfloat16)
        forward_kernel(a0, a1, t0, a2, None, 0, 2048, 64, 64, 6554, 1.11, 'gelu', False, 8, 1, 512)
        return t0
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ...partition.torch_private import TorchDispatchMode, empty_strided_on, is_watched
from .interpreter import INTERPRETED

__all__ = ["ALIGNMENT", "ON_AMD", "Replayed", "Replays", "has_short_offsets", "replayed", "writer"]

ALIGNMENT: Final = 16
"""Of an address in bytes: Triton compiles a kernel again for tensors that lie otherwise."""

ON_AMD: Final = torch.version.hip is not None

_MOST_REPLAYS: Final = 4096
_aten: Final = torch.ops.aten
# What makes a tensor that nobody has written to; its size and strides are read off the result.
_EMPTY: Final = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


class Replayed(NamedTuple):
    """A call that was replayed."""

    replay: Callable[..., Any]
    arguments: tuple[Any, ...]


class Replays:
    """An op that launches kernels, and what it did for the kinds of calls that came twice.

    A call that something else has to see goes to torch: a compiler, a dispatch mode, a transform, a profiler, a trace.

    What launches them may look at its tensors' layouts and at its options, never at their numbers, nor at what may
    change between calls. It returns new tensors, and writes to no other.

    Args:
        op: torch's, which calls `run`.
        run: launches the kernels.
    """

    def __init__(self, op: Any, run: Callable[..., Any]) -> None:
        self._op = op
        self._run = run
        # Torch makes floats of whole numbers where an op wants floats; a kernel is compiled for either.
        self._floats = {place for place, one in enumerate(op._schema.arguments) if str(one.type) == "float"}
        # With the number of the GPU, -1 for a CPU.
        self._replays: dict[tuple[Any, ...], tuple[Callable[..., Any], int]] = {}
        self._came: set[tuple[Any, ...]] = set()
        _every.append(self)

    def __call__(self, *arguments: Any) -> Any:
        kind = None if torch.compiler.is_dynamo_compiling() or is_watched() else _kind(arguments)
        if kind is None:
            return self._op(*arguments)
        known = self._replays.get(kind)
        if known is not None:
            replay, device = known
            return (replay if device < 0 or device == torch.cuda.current_device() else self._op)(*arguments)
        if kind in self._came:
            return self._write(kind, arguments)
        # To write down takes ten times as long as to run. Sizes that never come again shall not pay for it.
        if len(self._came) >= _MOST_REPLAYS:
            self._came.clear()
        self._came.add(kind)
        return self._op(*arguments)

    def _write(self, kind: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        wrote = _Writer()
        # Each is another object, also where one tensor is given twice: in the next call it may be two.
        given = [wrote.argument(one, is_float=place in self._floats) for place, one in enumerate(arguments)]
        with _writing(wrote), wrote:
            results = self._run(*given)
        if len(self._replays) >= _MOST_REPLAYS:
            self._replays.clear()
        self._replays[kind] = wrote.function(results) or self._op, wrote.device
        return results


def has_short_offsets(tensor: Tensor) -> bool:
    """Whether all of a tensor's memory is within 2 GB, for which Triton compiles by itself on AMD."""
    return tensor.untyped_storage().nbytes() < 1 << 31


def _kind(arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """All that decides what is done: a tensor's layout, how its address is aligned, and every option.

    None where a tensor is not a plain one that kernels run on.
    """
    kind: list[Any] = []
    for one in arguments:
        if one.__class__ is Tensor or one.__class__ is Parameter:
            if not (one.is_cuda or (INTERPRETED and one.is_cpu)) or one.is_neg():
                return None
            kind += one.dtype, one.shape, one.stride(), one.data_ptr() % ALIGNMENT, one.get_device()
            if ON_AMD:
                kind.append(has_short_offsets(one))
        elif one.__class__ is list:
            each = _kind(one)
            if each is None:
                return None
            kind += len(one), *each
        elif isinstance(one, Tensor):
            return None
        else:
            kind.append(one)
    return tuple(kind)


_every: list[Replays] = []


@contextmanager
def replayed() -> Iterator[list[Replayed]]:
    """Collect what is replayed inside the block, in all threads. Used by `fuselayers bench`."""
    collected: list[Replayed] = []

    def collecting(replay: Callable[..., Any]) -> Callable[..., Any]:
        def collect(*arguments: Any) -> Any:
            collected.append(Replayed(replay, arguments))
            return replay(*arguments)

        return collect

    before = [one._replays for one in _every]
    for one in _every:
        one._replays = {kind: (collecting(replay), device) for kind, (replay, device) in one._replays.items()}
    try:
        yield collected
    finally:
        for one, replays in zip(_every, before, strict=True):
            one._replays = replays


_here = threading.local()


def writer() -> "_Writer | None":
    """Return what writes down the launches of this thread, if anything does. Used by `launch`."""
    return getattr(_here, "writer", None)


@contextmanager
def _writing(wrote: "_Writer") -> Iterator[None]:
    _here.writer = wrote
    try:
        yield
    finally:
        _here.writer = None


class _NotWritten(Exception):
    """Something cannot be written down."""


class _Line(NamedTuple):
    text: str
    reads: set[str]
    makes: set[str] | None = None  # what nobody misses who reads none of it; None for a line that does something


class _Writer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down as Python what is called within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no other object gets the id of one of them
        self._looks: dict[str, tuple[Any, ...]] = {}
        self._whole: dict[str, tuple[str, int]] = {}  # of a view the tensor that it is one of, and the offset in bytes
        self._constants: dict[str, Any] = {}
        self._parameters: list[str] = []
        self._lines: list[_Line] = []
        self._obstacle: str | None = None
        self.device = -1

    def argument(self, given: Any, *, is_float: bool) -> Any:
        """Return an argument as it is handed on."""
        parameter = f"a{len(self._parameters)}"
        self._parameters.append(parameter)
        if isinstance(given, Tensor):
            return self._tensor(given, parameter)
        if isinstance(given, list) and given and isinstance(given[0], Tensor):
            each = [f"{parameter}_{place}" for place in range(len(given))]
            self._lines.append(_Line(f"{', '.join(each)}, = {parameter}", set()))
            return [self._tensor(one, name) for one, name in zip(given, each, strict=True)]
        return float(given) if is_float else given

    def _tensor(self, given: Tensor, name: str) -> Tensor:
        self.device = given.get_device()
        return self._name(given.detach(), name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        try:
            self._write_call(func, args, kwargs, out)
        except _NotWritten as obstacle:
            self._obstacle = str(obstacle)
        return out

    def launched(self, start: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Write down a launch.

        Args:
            start: launches the compiled kernel.
            arguments: of the kernel, its constants too.
        """
        try:
            reads: set[str] = set()
            words = [(self._pointer if isinstance(one, Tensor) else self._word)(one, reads) for one in arguments]
            self._lines.append(_Line(f"{self._constant(start)}({', '.join(words)})", reads))
        except _NotWritten as obstacle:
            self._obstacle = str(obstacle)

    def function(self, results: Any) -> Callable[..., Any] | None:
        """Return what was written as a function of the arguments that returns `results`, or None."""
        try:
            needed: set[str] = set()
            end = f"return {self._word(results, needed)}"
        except _NotWritten as obstacle:
            self._obstacle = str(obstacle)
        if self._obstacle is not None:
            return None
        body = [end]
        for line in reversed(self._lines):
            if line.makes is None or line.makes & needed:
                needed |= line.reads
                body.append(line.text)
        source = "\n    ".join([f"def replay({', '.join(self._parameters)}):", *reversed(body)])
        exec(source, self._constants)
        replay: Callable[..., Any] = self._constants.pop("replay")
        replay.__doc__ = source
        return replay

    def _write_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        if not any(isinstance(one, Tensor) for one in (*args, *outs)) and not kwargs:
            return  # of dtypes, which are options
        if torch.Tag.nondeterministic_seeded in func.tags or not all(isinstance(one, Tensor) for one in outs):
            raise _NotWritten(f"{func} draws numbers, or returns no tensors")
        reads: set[str] = set()
        if func in _EMPTY:
            name = self._new_name(out)
            empty = self._constant(empty_strided_on(out.device.type))
            text = f"{name} = {empty}({tuple(out.shape)}, {tuple(out.stride())}, {self._constant(out.dtype)})"
            self._lines.append(_Line(text, reads, {name}))
            return
        words = [self._word(one, reads) for one in args]
        words += [f"{key}={self._word(one, reads)}" for key, one in kwargs.items()]
        call = f"{self._constant(func)}({', '.join(words)})"
        if id(out) in self._names:  # written in place
            self._lines.append(_Line(call, reads))
            return
        names = [self._new_name(one) for one in outs]
        source = args[0] if args and isinstance(args[0], Tensor) and not func._schema.is_mutable else None
        are_views = source is not None
        for one, name in zip(outs, names, strict=True):
            if source is None or one.untyped_storage()._cdata != source.untyped_storage()._cdata:
                are_views = False
                continue
            whole, offset = self._whole.get(self._names[id(source)], (self._names[id(source)], 0))
            self._whole[name] = whole, offset + one.data_ptr() - source.data_ptr()
        made = "".join(f"{name}, " for name in names) if isinstance(out, (tuple, list)) else names[0]
        self._lines.append(_Line(f"{made} = {call}", reads, set(names) if are_views else None))

    def _pointer(self, tensor: Tensor, reads: set[str]) -> str:
        """A tensor that a kernel gets: of a view that begins where its whole begins, the whole."""
        name = self._word(tensor, reads)
        whole, offset = self._whole.get(name, (name, 0))
        if whole != name and offset == 0 and self._looks[whole][0] == tensor.dtype:
            reads.discard(name)
            reads.add(whole)
            return whole
        return name

    def _word(self, value: Any, reads: set[str]) -> str:
        if isinstance(value, Tensor):
            name = self._names.get(id(value))
            if name is None:
                raise _NotWritten("a tensor comes from elsewhere")
            whole, _ = self._whole.get(name, (name, 0))
            if self._looks[whole] == _look(value):
                name = whole
            reads.add(name)
            return name
        if isinstance(value, tuple):
            return f"({''.join(f'{self._word(one, reads)}, ' for one in value)})"
        if isinstance(value, list):
            return f"[{', '.join(self._word(one, reads) for one in value)}]"
        return repr(value) if value is None or type(value) in (bool, int, str) else self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _new_name(self, tensor: Tensor) -> str:
        name = f"t{len(self._kept)}"
        self._name(tensor, name)
        return name

    def _name(self, tensor: Tensor, name: str) -> Tensor:
        self._names[id(tensor)] = name
        self._kept.append(tensor)
        self._looks[name] = _look(tensor)
        return tensor


def _look(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()
