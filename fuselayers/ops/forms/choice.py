"""choice -- which form of an op is faster on this CPU: measured once, and remembered on disk.

A formula of one or two ops may run faster op by op, a long one compiled; it depends on the shape, the layout, the dtype
and the machine. So "auto" tries. To compile takes seconds, and is done only where it pays: an op begins as its formula,
and when its forwards have taken as long as `warm_up` says, both forms are measured in turns, forward and backward. The
compiled form serves from then on where it is clearly faster, in this process and in later ones: `partition.timings`
keeps the times, beside those of fused functions.

The forms differ in the last bits. So nothing is measured, and the formula serves, while torch shall be deterministic
(`torch.use_deterministic_algorithms`). It also serves small tensors, where there is no C++ compiler, under dispatch
modes, which watch what is called, and under `torch.utils.checkpoint` and its kin, which compare what a forward saves
with what it saves when it runs again.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..._torch.dispatch import dispatch_mode_is_active, saved_tensors_hooks_are_active, transforms_are_active
from ...partition import BackendUnavailableError
from ...partition.auto import seconds_of
from ...partition.timings import has_choice, may_measure, remember, remembered, warm_up_seconds
from .compiled import why_not_compiled
from .served import forget_served, serve_and_keep

__all__ = ["call_faster", "faster_form", "forget_forms"]

_log = logging.getLogger("fuselayers")

# Below this many elements what a compiled call costs by itself, some 50 us, is more than it could gain.
_SMALLEST: Final = 1 << 16
# What a measurement may not tell apart counts for the formula: of one pair, cross_entropy of 2048x1024 on two cores of
# a Xeon, it read 0.84 to 0.87.
_CLEARLY: Final = 0.9

_Key = tuple[Any, ...]
_spent: dict[_Key, float] = {}
_decided: dict[_Key, bool] = {}
_lock = threading.RLock()


def faster_form(seconds: Mapping[str, float | None]) -> str:
    """Return which form serves, by the seconds of both: "inductor" if it is clearly faster, else "eager".

    >>> faster_form({"eager": 1.0, "inductor": 0.95}), faster_form({"eager": 1.0, "inductor": 0.87})
    ('eager', 'inductor')
    """
    eager, inductor = seconds["eager"], seconds["inductor"]
    return "inductor" if eager is not None and inductor is not None and inductor < _CLEARLY * eager else "eager"


def forget_forms() -> None:
    """Let every op choose again in this process, by what `timings` remembers. Used by `fuselayers tune`."""
    with _lock:
        _spent.clear()
        _decided.clear()
        forget_served()


def call_faster(
    formula: Callable[..., Any],
    fused: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    options: tuple[Any, ...] = (),
) -> Any:
    """Call the op in the form that is faster, as far as is known. Used by dispatch for "auto" on a CPU.

    Args:
        formula: the op in plain torch.
        fused: the op in its compiled form.
        tensors: of both the first arguments, one at least.
        options: of both the others, which are hashable.
    """
    first = tensors[0]
    assert first is not None
    if first.numel() < _SMALLEST:
        return serve_and_keep(formula, tensors, options)
    key = _key(formula, tensors, options)
    compiled = _decided.get(key)
    if compiled is not False and not _may_be_compiled():
        return formula(*tensors, *options)
    if compiled is None and (key not in _spent or _spent[key] >= warm_up_seconds()):
        compiled = _decide(key, formula, fused, tensors, options)
    if compiled:
        try:
            return serve_and_keep(fused, tensors, options, may=_may_be_compiled)
        except BackendUnavailableError as error:  # what an earlier process could compile, this one cannot
            _log.info("the formula serves, since it could not be compiled: %s", error)
            _decided[key] = compiled = False
    if compiled is not None:
        return serve_and_keep(formula, tensors, options)
    started = time.perf_counter()
    result = formula(*tensors, *options)
    _spent[key] = _spent.get(key, 0.0) + time.perf_counter() - started
    return result


def _may_be_compiled() -> bool:
    """Whether another form than the formula may serve a call here and now."""
    return has_choice() and not (
        saved_tensors_hooks_are_active() or dispatch_mode_is_active() or transforms_are_active()
    )


def _key(formula: Callable[..., Any], tensors: Sequence[Tensor | None], options: tuple[Any, ...]) -> _Key:
    """What decides a call's speed: op, threads, options; of each tensor dtype, width, layout, about how many rows."""
    grad = torch.is_grad_enabled()
    key = [formula, torch.get_num_threads(), options]
    for one in tensors:
        if one is None:
            key.append(None)
        elif one.is_floating_point():
            width = one.shape[-1] if one.dim() else 1
            key += (one.dtype, width, (one.numel() // max(width, 1)).bit_length())
            key += (one.is_contiguous(), grad and one.requires_grad)
    return tuple(key)


def _described(formula: Callable[..., Any], tensors: Sequence[Tensor | None], options: tuple[Any, ...]) -> str:
    """The key in words, for the file."""
    grad = torch.is_grad_enabled()
    words = [formula.__module__.rpartition(".ops.")[2]]
    for one in (*tensors, *options):
        if not isinstance(one, Tensor):
            words.append(str(one))
        elif one.is_floating_point():
            width = one.shape[-1] if one.dim() else 1
            rows = one.numel() // max(width, 1)
            words.append(f"{one.dtype} {1 << rows.bit_length() - 1 if rows else 0}+x{width}")
            words[-1] += "" if one.is_contiguous() else " apart"
            words[-1] += " grad" if grad and one.requires_grad else ""
    return ", ".join(words).replace("torch.", "")


def _decide(
    key: _Key,
    formula: Callable[..., Any],
    fused: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    options: tuple[Any, ...],
) -> bool | None:
    """True for the compiled form, False for the formula, None while it is too early to tell."""
    with _lock:
        if key in _decided:
            return _decided[key]
        name = _described(formula, tensors, options)
        seconds = remembered(name)
        if seconds is None or not {"eager", "inductor"} <= seconds.keys():
            if _spent.setdefault(key, 0.0) < warm_up_seconds() or not may_measure():
                return None
            seconds = None
            if why_not_compiled(torch.device("cpu")) is None:
                seconds = _measure(formula, fused, tensors, options)
            if seconds is not None:
                remember(name, seconds)
        _decided[key] = seconds is not None and faster_form(seconds) == "inductor"
        return _decided[key]


def _measure(
    formula: Callable[..., Any],
    fused: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    options: tuple[Any, ...],
) -> dict[str, float] | None:
    """The seconds of both forms, with backward if there will be one; None if measuring fails.

    It runs where the op will run, on the caller's thread: another one has memory of its own, which decides the time of
    what allocates.
    """
    # What goes wrong here goes wrong in a measurement, most likely for want of memory: the formula may be fine.
    try:
        return seconds_of({"eager": formula, "inductor": fused}, (*tensors, *options))
    except Exception as error:
        _log.info("the formula serves, since measuring failed with %s: %s", type(error).__name__, error)
        return None
