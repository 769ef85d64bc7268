"""replay -- what a call of an op did, done again for calls like it with as little Python as can be.

A call of an op checks its arguments, chooses a form, works out tiles, strides and a grid, and what a kernel is compiled
for. All of that follows from the layouts of the tensors and from the options. So when a kind of call comes a second
time, what is done is written down as straight-line Python: the tensors that are made, the launches, and torch's own ops
between them. Calls of that kind run it from then on, and backward likewise.

    def replay(a0, a1, a2):
        t0 = empty_strided((8, 256, 512), (131072, 512, 1), bfloat16)
        forward_kernel(a0, a1, t0, a2, None, 0, 2048, 64, 64, 6554, 1.11, 'gelu', False, 8, 1, 512)
        return t0, (a0, a1, a2, None)

Where autograd needs a backward, that is the forward of a `torch.autograd.Function` of its own: what it returns, and
what it saves.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..._torch.dispatch import apply_plainly, current_device, is_any_autocast_enabled, is_watched
from .alike import MOST_ALIKE, is_plain, like_these, put_first
from .interpreter import INTERPRETED
from .served import OTHERWISE, Served
from .writer import Saving, Writer, writing

__all__ = ["ALIGNMENT", "ON_AMD", "Replayed", "Replays", "has_short_offsets", "replayed"]

ALIGNMENT: Final = 16
"""Of an address in bytes: Triton compiles a kernel again for tensors that lie otherwise."""

ON_AMD: Final = torch.version.hip is not None

# Of an op, that came. One takes a hundredth of what is known of it then.
_MOST_KINDS: Final = 8192


class Replayed(NamedTuple):
    """A call that was replayed."""

    replay: Callable[..., Any]
    arguments: tuple[Any, ...]


class Replays:
    """Calls a function of tensors and options that launches kernels; what came twice is replayed.

    On a CPU, whose forms launch nothing, what served a call is called at once for the next one (see served).

    A call that something else has to see is worked out anew: a compiler, a mode, a transform, a profiler, a trace.

    The function may look at its tensors' layouts, at its options, at whether autograd records, at autocast and, but for
    a CPU, at the default dtype, never at its tensors' numbers, nor at what else may change between calls. It returns
    new tensors, or those it got, and writes to none of these.

    Args:
        call: takes the tensors and the options, one after the other.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._known: dict[tuple[Any, ...], tuple[_Known, ...]] = {}
        self._came: dict[tuple[Any, ...], int] = {}
        self._served = Served()
        self._lock = threading.Lock()

    def __call__(self, tensors: Sequence[Tensor | None], options: tuple[Any, ...] = ()) -> Any:
        """Return what the function makes of the tensors, the first of which is there, and of the options."""
        first: Any = tensors[0]
        if torch.compiler.is_dynamo_compiling():
            return self._call(*tensors, *options)
        # Written out: each call of a function of Python's takes time, on a CPU most of all (see served).
        if not (first.__class__ is Tensor or first.__class__ is Parameter):
            return self._call(*tensors, *options)
        if first.is_cpu and not INTERPRETED:
            try:
                kept = self._served.known.get((first.shape, options), ())
            except TypeError:  # options that are not hashable
                return self._call(*tensors, *options)
            for serve in kept:
                results = serve(options, *tensors)
                if results is not OTHERWISE:
                    return results
            return self._served.anew(self._call, tensors, options)
        if not (first.is_cuda or first.is_cpu) or is_watched():
            return self._call(*tensors, *options)
        # 1, 1.0 and True are equal, and an op may take one of them alone.
        key = first.shape, options, tuple(map(type, options)), torch.is_grad_enabled(), torch.get_default_dtype()
        try:
            alike = self._known.get(key)
        except TypeError:  # likewise
            return self._call(*tensors, *options)
        if alike is not None:
            for known in alike:
                if known.fits(*tensors):
                    return known.run(*tensors)
        return self._anew(key, tensors, options)

    def _anew(self, key: tuple[Any, ...], tensors: Sequence[Tensor | None], options: tuple[Any, ...]) -> Any:
        kind = _kind(key, tensors, options)
        if kind is None:
            return self._call(*tensors, *options)
        with self._lock:
            if len(self._came) >= _MOST_KINDS:
                self._came.clear()
            times = self._came[kind] = self._came.get(kind, 0) + 1
        # To write down takes far longer than to run: sizes that never come again shall not pay for it, nor shall what
        # comes again and again without being known, since it differs in what a kind does not hold.
        fits = _fits(tensors) if 1 < times <= 1 + MOST_ALIKE else None
        if fits is None:
            return self._call(*tensors, *options)
        wrote = Writer(tensors, _remade)
        with writing(wrote):
            results = self._call(*tensors, *options)
        run = wrote.replay(results)
        known = _Known(fits, run or (lambda *others: self._call(*others, *options)))
        if run is not None and not wrote.has_function:
            _add(known)
        with self._lock:
            put_first(self._known, key, known)
        return results


def has_short_offsets(tensor: Tensor) -> bool:
    """Whether all of a tensor's memory is within 2 GB, for which Triton compiles by itself on AMD."""
    return tensor.untyped_storage().nbytes() < 1 << 31


@contextmanager
def replayed() -> Iterator[list[Replayed]]:
    """Collect what is replayed inside the block, in all threads, of what is known already. Used by `bench`."""
    collected: list[Replayed] = []

    def collecting(replay: Callable[..., Any]) -> Callable[..., Any]:
        def collect(*arguments: Any) -> Any:
            collected.append(Replayed(replay, arguments))
            return replay(*arguments)

        return collect

    with _lock:
        before = [(one, one.run) for one in _replays]
    for one, run in before:
        one.run = collecting(run)
    try:
        yield collected
    finally:
        for one, run in before:
            one.run = run


class _Replay:
    """What was written down, without autograd.

    Attributes:
        run: takes the tensors, and does it.
    """

    __slots__ = ("__weakref__", "run")

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


class _Known(_Replay):
    """A call that is known.

    Attributes:
        fits: takes the tensors, and says whether they are like those that came before.
    """

    __slots__ = ("fits",)

    def __init__(self, fits: Callable[..., bool], run: Callable[..., Any]) -> None:
        super().__init__(run)
        self.fits = fits


_replays: "weakref.WeakSet[_Replay]" = weakref.WeakSet()
_lock = threading.Lock()


def _add(one: _Replay) -> None:
    with _lock:
        _replays.add(one)


def _autocast_dtypes() -> list[torch.dtype]:
    return [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]


def _kind(key: tuple[Any, ...], tensors: Sequence[Tensor | None], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What most of all decides what is done, by which calls that come again are known; None for what cannot be."""
    if any(isinstance(one, Tensor) for one in options):
        return None
    kind: list[Any] = [key, len({id(one) for one in tensors})]
    for one in tensors:
        if one is None:
            kind.append(None)
        elif not isinstance(one, Tensor) or not is_plain(one):
            return None
        else:
            kind += one.dtype, one.shape, one.stride(), one.data_ptr() % ALIGNMENT, one.get_device(), one.requires_grad
    return tuple(kind)


def _fits(tensors: Sequence[Tensor | None]) -> Callable[..., bool] | None:
    """Return what says whether tensors are like these; None if nothing can.

    Beside what `like_these` looks at, that is how the address is aligned, and to what autocast casts.
    """
    given = [(f"a{place}", one) for place, one in enumerate(tensors) if one is not None]
    alike = like_these([one for _, one in given])
    if alike is None:
        return None
    names: dict[str, Any] = {"alike": alike, "current_device": current_device, "has_short_offsets": has_short_offsets}
    conditions = [f"alike({', '.join(name for name, _ in given)})"]
    conditions += [f"a{place} is None" for place, one in enumerate(tensors) if one is None]
    aligned = [f"{name}.data_ptr()" for name, one in given if one.data_ptr() % ALIGNMENT == 0]
    if aligned:
        conditions.append(f"({' | '.join(aligned)}) % {ALIGNMENT} == 0")
    for name, one in given:
        if one.data_ptr() % ALIGNMENT:
            conditions.append(f"{name}.data_ptr() % {ALIGNMENT} == {one.data_ptr() % ALIGNMENT}")
        if ON_AMD:
            conditions.append(f"has_short_offsets({name}) is {has_short_offsets(one)}")
    if is_any_autocast_enabled():  # that it is off, they are alike in
        names |= {"autocast_dtypes": _autocast_dtypes, "now": _autocast_dtypes()}
        conditions.append("autocast_dtypes() == now")
    device = given[0][1].get_device()
    if device >= 0:
        conditions.append(f"current_device() == {device}")
    parameters = ", ".join(f"a{place}" for place in range(len(tensors)))
    fits: Callable[..., bool] = eval(f"lambda {parameters}: {' and '.join(conditions)}", names)
    return fits


def _remade(saving: Saving) -> Callable[..., Any]:
    """Return what calls an autograd function that was written down; its backward is written down when it comes."""
    replay = _Replay(saving.forward)
    _add(replay)
    known: dict[tuple[Any, ...], list[_Known]] = {}
    times = 0

    def forward(ctx: Any, *tensors: Tensor) -> Any:
        results, saved = replay.run(*tensors)
        ctx.save_for_backward(*saved)
        if not saving.materialize:
            ctx.set_materialize_grads(False)
        return results

    def backward(ctx: Any, *incoming: Tensor | None) -> Any:
        wants, saved = ctx.needs_input_grad, ctx.saved_tensors
        # A second derivative takes another way.
        if torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled() or is_watched():
            return saving.backward(saved, wants, incoming)
        key = wants, torch.get_default_dtype()
        alike = known.get(key)
        if alike is not None:
            for one in alike:
                if one.fits(*saved, *incoming):
                    return one.run(*saved, *incoming)
        return anew(key, saved, incoming)

    def anew(key: tuple[Any, ...], saved: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
        nonlocal times
        tensors = *saved, *incoming
        fits = _fits(tensors) if times < MOST_ALIKE else None
        if fits is None:
            return saving.backward(saved, key[0], incoming)
        times += 1
        wrote = Writer(tensors)
        with writing(wrote):
            gradients = saving.backward(saved, key[0], incoming)
        run = wrote.replay(gradients)
        one = _Known(fits, run or (lambda *others: saving.backward(others[: len(saved)], key[0], others[len(saved) :])))
        if run is not None:
            _add(one)
        known[key] = [*known.get(key, ()), one]
        return gradients

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return apply_plainly(type(saving.name, (torch.autograd.Function,), members))
