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

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ...partition.torch_private import apply_plainly, current_device, is_watched, is_wrapped, tensors_like
from .interpreter import INTERPRETED
from .writer import Saving, Writer, writing

__all__ = ["ALIGNMENT", "ON_AMD", "Replayed", "Replays", "has_short_offsets", "replayed"]

ALIGNMENT: Final = 16
"""Of an address in bytes: Triton compiles a kernel again for tensors that lie otherwise."""

ON_AMD: Final = torch.version.hip is not None

_MOST_KINDS: Final = 4096
# Calls with equal options and a first tensor of one shape are told apart one by one.
_MOST_ALIKE: Final = 8
_NEVER: Final = -1


class Replayed(NamedTuple):
    """A call that was replayed."""

    replay: Callable[..., Any]
    arguments: tuple[Any, ...]


class Replays:
    """Calls a function of tensors and options that launches kernels; what came twice is replayed.

    A call that something else has to see is worked out anew: a compiler, a dispatch mode, a transform, a profiler, a
    trace.

    The function may look at its tensors' layouts and at its options, never at their numbers, nor at what may change
    between calls. It returns new tensors, or those it got, and writes to none of these.

    Args:
        call: takes the tensors and the options, one after the other.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._known: dict[tuple[Any, ...], list[_Known]] = {}
        # How often each kind of call was written down, and _NEVER for one that cannot be.
        self._came: dict[tuple[Any, ...], int] = {}

    def __call__(self, tensors: Sequence[Tensor | None], options: tuple[Any, ...] = ()) -> Any:
        """Return what the function makes of the tensors, the first of which is there, and of the options."""
        first: Any = tensors[0]
        if torch.compiler.is_dynamo_compiling() or not _runs_kernels(first) or is_watched():
            return self._call(*tensors, *options)
        key = options, first.shape, torch.is_grad_enabled()
        try:
            alike = self._known.get(key)
        except TypeError:  # options that are not hashable
            return self._call(*tensors, *options)
        if alike is not None:
            for known in alike:
                if known.fits(*tensors):
                    return known.run(*tensors)
        return self._anew(key, tensors, options)

    def _anew(self, key: tuple[Any, ...], tensors: Sequence[Tensor | None], options: tuple[Any, ...]) -> Any:
        kind = _kind(tensors, options)
        if kind is None:
            return self._call(*tensors, *options)
        times = self._came.get(kind)
        if times is None:
            # To write down takes ten times as long as to run. Sizes that never come again shall not pay for it.
            if len(self._came) >= _MOST_KINDS:
                self._came.clear()
                self._known.clear()
            self._came[kind] = 0
        if times is None or times == _NEVER:
            return self._call(*tensors, *options)
        results, known = _written(self._call, tensors, options)
        # A kind that comes again and again without being known, since something else differs, is left alone.
        self._came[kind] = _NEVER if known is None or times + 1 == _MOST_ALIKE else times + 1
        if known is not None:
            self._known[key] = [known, *self._known.get(key, ())][:_MOST_ALIKE]
        return results


def has_short_offsets(tensor: Tensor) -> bool:
    """Whether all of a tensor's memory is within 2 GB, for which Triton compiles by itself on AMD."""
    return tensor.untyped_storage().nbytes() < 1 << 31


@contextmanager
def replayed() -> Iterator[list[Replayed]]:
    """Collect what is replayed inside the block, in all threads. Used by `fuselayers bench`."""
    collected: list[Replayed] = []

    def collecting(replay: Callable[..., Any]) -> Callable[..., Any]:
        def collect(*arguments: Any) -> Any:
            collected.append(Replayed(replay, arguments))
            return replay(*arguments)

        return collect

    before = [(one, one.run) for one in _works]
    for one, run in before:
        one.run = collecting(run)
    try:
        yield collected
    finally:
        for one, run in before:
            one.run = run


class _Work:
    """What was written down.

    Attributes:
        run: takes the tensors, and does it.
    """

    __slots__ = ("__weakref__", "run")

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


class _Known(_Work):
    """A call that was written down.

    Attributes:
        fits: takes the tensors, and says whether they are like those that it was written for.
    """

    __slots__ = ("fits",)

    def __init__(self, fits: Callable[..., bool], run: Callable[..., Any]) -> None:
        super().__init__(run)
        self.fits = fits


_works: "weakref.WeakSet[_Work]" = weakref.WeakSet()


def _runs_kernels(tensor: Any) -> bool:
    plain = tensor.__class__ is Tensor or tensor.__class__ is Parameter
    return plain and (tensor.is_cuda or (INTERPRETED and tensor.is_cpu))


def _is_plain(tensor: Tensor) -> bool:
    return _runs_kernels(tensor) and not tensor.is_neg() and not is_wrapped(tensor)


def _kind(tensors: Sequence[Tensor | None], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What most of all decides what is done, by which calls that come again are known; None for what cannot be."""
    kind: list[Any] = [torch.is_grad_enabled(), *options]
    if any(isinstance(one, Tensor) for one in options):
        return None
    for one in tensors:
        if one is None:
            kind.append(None)
        elif not isinstance(one, Tensor) or not _is_plain(one):
            return None
        else:
            kind += one.dtype, one.shape, one.stride(), one.data_ptr() % ALIGNMENT, one.get_device(), one.requires_grad
    kind.append(len({id(one) for one in tensors}))
    return tuple(kind)


def _fits(tensors: Sequence[Tensor | None]) -> Callable[..., bool] | None:
    """Return what says whether tensors are like these; None if nothing can.

    Alike are class, dtype, device, sizes, strides, how the address is aligned, whether a gradient is needed, what torch
    dispatches on, and that each is another object: one tensor in two places may be two in the next call.
    """
    given = [(f"a{place}", one) for place, one in enumerate(tensors) if one is not None]
    if not all(_is_plain(one) for _, one in given):
        return None
    alike = tensors_like(*(one for _, one in given))
    if not alike(*(one for _, one in given)):
        return None
    names = {"alike": alike, "current_device": current_device, "has_short_offsets": has_short_offsets}
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
    device = given[0][1].get_device()
    if device >= 0:
        conditions.append(f"current_device() == {device}")
    parameters = ", ".join(f"a{place}" for place in range(len(tensors)))
    fits: Callable[..., bool] = eval(f"lambda {parameters}: {' and '.join(conditions)}", names)
    return fits


def _written(
    call: Callable[..., Any], tensors: Sequence[Tensor | None], options: tuple[Any, ...]
) -> tuple[Any, _Known | None]:
    """Call, and write down what is done."""
    fits = _fits(tensors)
    wrote = Writer(tensors, _applied)
    with writing(wrote):
        results = call(*tensors, *options)
    run = wrote.function(results)
    # A formula is left to torch, which may have other ideas of it the next time.
    if fits is None or run is None or wrote.only_calls_torch:
        return results, None
    known = _Known(fits, run)
    if not wrote.applies:
        _works.add(known)
    return results, known


def _applied(saving: Saving) -> Callable[..., Any]:
    """Return what calls an autograd function that was written down; its backward is when it comes."""
    work = _Work(saving.work)
    _works.add(work)
    known: dict[tuple[bool, ...], list[_Known]] = {}
    times = 0

    def forward(ctx: Any, *tensors: Tensor) -> Any:
        results, saved = work.run(*tensors)
        ctx.save_for_backward(*saved)
        if not saving.materialize:
            ctx.set_materialize_grads(False)
        return results

    def backward(ctx: Any, *incoming: Tensor | None) -> Any:
        wants, saved = ctx.needs_input_grad, ctx.saved_tensors
        # A second derivative takes another way.
        if torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled() or is_watched():
            return saving.backward(saved, wants, incoming)
        alike = known.get(wants)
        if alike is not None:
            for one in alike:
                if one.fits(*saved, *incoming):
                    return one.run(*saved, *incoming)
        return anew(wants, saved, incoming)

    def anew(wants: tuple[bool, ...], saved: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
        nonlocal times
        if times == _MOST_ALIKE:
            return saving.backward(saved, wants, incoming)
        times += 1
        tensors = *saved, *incoming
        fits = _fits(tensors)
        wrote = Writer(tensors)
        with writing(wrote):
            gradients = saving.backward(saved, wants, incoming)
        run = wrote.function(gradients)
        if fits is not None and run is not None:
            one = _Known(fits, run)
            _works.add(one)
            known[wants] = [*known.get(wants, ()), one]
        return gradients

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return apply_plainly(type(saving.name, (torch.autograd.Function,), members))
