"""timings -- what "auto" measured: how long it waits before it measures, when it may, and what it remembers on disk.

Two things choose by time: an op called by itself, between its formula and its compiled form, and a fused function,
between backends. They share one file, `auto_file`: for each machine, with the versions that decide its speed, what was
measured and the seconds of each candidate.
"""

import functools
import json
import logging
import math
import os
import platform
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from .._torch.dispatch import (
    dispatch_mode_is_active,
    is_compiling,
    saved_tensors_hooks_are_active,
    transforms_are_active,
)
from .._torch.tracing import compiler_version
from .cache import cache_file, locked, sources_hash, write_json
from .machine import processor_name

__all__ = [
    "auto_file",
    "has_choice",
    "may_measure",
    "measured_anew",
    "patience",
    "patience_in_seconds",
    "remember",
    "remembered",
]

_log = logging.getLogger("fuselayers")
_patience = 1.0
_lock = threading.RLock()
_anew: dict[str, Mapping[str, float | None]] | None = None
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Change how long "auto" runs what it begins with before it measures whether something else is faster.

    An op on a CPU begins with its formula, a fused function with Inductor. Dropout's masks are no part of it: they have
    the same bits however they are made.

    Args:
        seconds: 0 measures at the first call; with `math.inf` an op, and a function that is compiled meanwhile, stays
            with what it begins with, whatever was measured before, so that a run gives the same bits each time. Where
            nothing is said it is 1.

    Raises:
        ValueError: the number is below 0.

    >>> with patience(math.inf):
    ...     torch.nn.Linear(8, 8)
    Linear(in_features=8, out_features=8, bias=True)
    """
    global _patience
    if not seconds >= 0:
        raise ValueError(f"patience must be a number of seconds from 0 on, got {seconds}")
    before, _patience = _patience, seconds
    try:
        yield
    finally:
        _patience = before


def patience_in_seconds() -> float:
    """What `patience` says at this moment."""
    return _patience


def has_choice() -> bool:
    """Return whether "auto" may take another candidate than the one it begins with.

    Not where torch shall be deterministic, since the candidates differ in the last bits; nor without patience; nor in a
    distributed run, whose ranks would choose each for itself.
    """
    return not (math.isinf(_patience) or torch.are_deterministic_algorithms_enabled() or _is_distributed())


def may_measure() -> bool:
    """Return whether "auto" may run its candidates here and now.

    Not where somebody watches what is called or saved: under a dispatch mode, under `torch.utils.checkpoint` and its
    kin that use hooks, inside a transform of `torch.func`, while something is compiled or captured in a CUDA graph.
    """
    return has_choice() and not (
        is_compiling()
        or saved_tensors_hooks_are_active()
        or dispatch_mode_is_active()
        or transforms_are_active()
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def auto_file() -> Path:
    """Where the measurements are kept, a JSON file that may be read, edited or deleted."""
    return cache_file("auto.json")


def remembered(name: str, device_type: str = "cpu") -> Mapping[str, float | None] | None:
    """Return the seconds of each candidate that were measured for `name` on this machine, or None.

    None are the seconds of a candidate that did not work.
    """
    known: Mapping[str, Mapping[str, float | None]]
    known = _all_remembered().get(_machine(device_type), {}) if _anew is None else _anew
    return known.get(name)


def remember(name: str, seconds: Mapping[str, float | None], device_type: str = "cpu") -> None:
    """Keep the seconds of each candidate for `name`, for this process and later ones."""
    if _anew is not None:
        _anew[name] = dict(seconds)
        return
    try:
        _keep({name: seconds}, device_type)
    except (OSError, RuntimeError) as error:
        _log.info("times are not kept for later processes: %s", error)


@contextmanager
def measured_anew(device_type: str = "cpu", *, keep: bool) -> Iterator[dict[str, Mapping[str, float | None]]]:
    """Within it what was measured before does not count, and what is measured is gathered. Used by `fuselayers tune`.

    Args:
        device_type: where it is measured.
        keep: whether what was gathered is written down at the end, over what was there.

    Raises:
        OSError: (at the end) it could not be written.
        RuntimeError: (at the end) nobody's home, where it would be.
    """
    global _anew
    before, _anew = _anew, {}
    gathered = _anew
    try:
        yield gathered
    finally:
        _anew = before
    if keep and gathered:
        _keep(gathered, device_type)


def _keep(times: Mapping[str, Mapping[str, float | None]], device_type: str) -> None:
    path = auto_file()
    with _lock, locked(path):
        if path.exists() and _all_remembered() is _NOTHING:  # somebody's edits, with a slip of the pen
            os.replace(path, path.with_suffix(".unreadable.json"))
        known = {machine: dict(one) for machine, one in _all_remembered().items()}
        known.setdefault(_machine(device_type), {}).update({name: dict(seconds) for name, seconds in times.items()})
        write_json(path, known)
    _log.info("%s; kept in %s", times, path)


def _machine(device_type: str) -> str:
    if device_type == "cuda":
        where = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        where = f"{processor_name()} {platform.machine()}, {torch.get_num_threads()} threads"
    return f"{where}, {compiler_version(device_type)}, torch {torch.__version__}, fuselayers {sources_hash()[:12]}"


def _all_remembered() -> Mapping[str, Any]:
    """What the file holds. A file that cannot be used is said once, and stops nothing."""
    try:
        path = auto_file()
        found = path.stat()
        return _read(path, (found.st_mtime_ns, found.st_ino, found.st_size))
    except (OSError, RuntimeError):  # no such file, none that may be read, or nobody's home
        return _NOTHING


@functools.lru_cache(maxsize=4)
def _read(path: Path, _state: tuple[int, ...]) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for known in content.values():
            for seconds in known.values():
                sum(one for one in seconds.values() if one is not None) + 0.0
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        warnings.warn(
            f"{path} does not hold times as they are written there ({type(error).__name__}: {error}) and is not used; "
            f"mend it, or delete it; before something else is written there it is put aside",
            stacklevel=2,
        )
        return _NOTHING
    return content  # type: ignore[no-any-return]
