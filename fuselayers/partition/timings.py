"""timings -- the rules of "auto": how long it waits before it measures, when it may, and the times that it remembers.

The times are in one JSON file, `auto_file`: for each machine, with the versions that decide its speed, the seconds of
each candidate of each graph.
"""

import logging
import math
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from .._torch.dispatch import (
    dispatch_mode_is_active,
    is_compiling,
    saved_tensors_hooks_are_active,
    transforms_are_active,
)
from .._torch.tracing import compiler_version
from ..sources import sources_hash
from .cache import cache_file, locked, read_json, warn_of_entries, write_json
from .machine import processor_name

_Times = Mapping[str, float | None]

_log = logging.getLogger("fuselayers")
# How long `tune` waits for the lock of `auto_file`: it measured for minutes, and another writer needs milliseconds.
_LOCK_SECONDS: Final = 1.0
_warm_up = 1.0
_anew: dict[str, _Times] | None = None


@contextmanager
def warm_up(seconds: float) -> Iterator[None]:
    """Change how long "auto" runs a graph with the first backend before it measures the others.

    Args:
        seconds: of calls, by the CPU's clock; on a GPU of launching them, since a call does not wait for its kernels. 0
            measures at the first call. With `math.inf` nothing is measured, and a function that is compiled meanwhile
            stays with the first backend, so that each run gives the same bits. The default is 1.

    Raises:
        ValueError: the number is below 0.

    >>> with warm_up(math.inf):
    ...     torch.nn.Linear(8, 8)
    Linear(in_features=8, out_features=8, bias=True)
    """
    global _warm_up
    if not seconds >= 0:
        raise ValueError(f"warm_up must be a number of seconds from 0 on, got {seconds}")
    before, _warm_up = _warm_up, seconds
    try:
        yield
    finally:
        _warm_up = before


def warm_up_seconds() -> float:
    """Return the present seconds of `warm_up`."""
    return _warm_up


def has_choice() -> bool:
    """Return whether "auto" may take another candidate than the first backend.

    It may not in deterministic mode, since the candidates differ in the last bits; nor with an infinite warm-up; nor in
    a distributed run, whose ranks would choose each for itself.
    """
    return not (math.isinf(_warm_up) or torch.are_deterministic_algorithms_enabled() or _is_distributed())


def may_measure() -> bool:
    """Return whether "auto" may run its candidates here and now.

    It may not where something observes calls or saved tensors: under a dispatch mode, under `torch.utils.checkpoint`
    and other users of hooks, inside a transform of `torch.func`, during compilation or the capture of a CUDA graph.
    """
    return has_choice() and not (
        is_compiling()
        or saved_tensors_hooks_are_active()
        or dispatch_mode_is_active()
        or transforms_are_active()
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
    )


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def auto_file() -> Path:
    """Return the JSON file of measured times, which may be read, edited or deleted."""
    return cache_file("auto.json")


def remembered(key: str, device_type: str = "cpu") -> _Times | None:
    """Return the seconds of each candidate that were measured for `key` on this machine, or None.

    A candidate that did not work has None.
    """
    if _anew is not None:
        return _anew.get(key)
    return _all_times().get(_machine(device_type), {}).get(key)


def remember(key: str, seconds: _Times, device_type: str = "cpu") -> None:
    """Store the seconds of each candidate for `key`, for this process and later ones."""
    if _anew is not None:
        _anew[key] = dict(seconds)
        return
    try:
        _store({key: seconds}, device_type)
    except (OSError, RuntimeError) as error:
        _log.info("the times are not stored for later processes: %s", error)


@contextmanager
def measured_anew(device_type: str = "cpu", *, keep: bool) -> Iterator[dict[str, _Times]]:
    """Ignore the times that were measured before, and yield those that are measured meanwhile. For `fuselayers tune`.

    Args:
        device_type: where the graphs run.
        keep: whether the new times are stored at the end, in place of older ones.

    Raises:
        OSError: (at the end) the file could not be written, or another process held its lock for a second.
        RuntimeError: (at the end) the user has no home folder for it.
    """
    global _anew
    before, _anew = _anew, {}
    measured = _anew
    try:
        yield measured
    finally:
        _anew = before
    if keep and measured:
        _store(measured, device_type, wait=_LOCK_SECONDS)


def _store(times: Mapping[str, _Times], device_type: str, *, wait: float = 0.0) -> None:
    path = auto_file()
    with locked(path, wait=wait):
        known = _all_times()
        known.setdefault(_machine(device_type), {}).update({key: dict(seconds) for key, seconds in times.items()})
        write_json(path, known)
    _log.info("%s; stored in %s", times, path)


def _machine(device_type: str) -> str:
    if device_type == "cuda":
        where = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        where = f"{processor_name()} {platform.machine()}, {torch.get_num_threads()} threads"
    return f"{where}, {compiler_version(device_type)}, torch {torch.__version__}, fuselayers {sources_hash()[:12]}"


def _all_times() -> dict[str, dict[str, _Times]]:
    """Return the times that the file holds, without the entries that hold something else."""
    try:
        path = auto_file()
    except RuntimeError:  # no home folder
        return {}
    times: dict[str, dict[str, _Times]] = {}
    wrong: list[str] = []
    for machine, known in read_json(path).items():
        if not isinstance(known, dict):
            wrong.append(machine)
            continue
        times[machine] = {key: seconds for key, seconds in known.items() if _are_times(seconds)}
        wrong += known.keys() - times[machine].keys()
    warn_of_entries(path, wrong)
    return times


def _are_times(seconds: Any) -> bool:
    """Whether at least one candidate of a graph has a finite number of seconds from 0 on, and the others it or None."""
    if not isinstance(seconds, dict):
        return False
    known = [one for one in seconds.values() if one is not None]
    # An integer of JSON may be too large for a float.
    return bool(known) and all(type(one) in (int, float) and 0 <= one <= sys.float_info.max for one in known)
