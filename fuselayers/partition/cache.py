"""cache -- the folder of measurements, with one JSON file for each kind. Used by machine and timings.

A file is replaced as a whole: a reader finds either the old content or the new. A file that holds something else never
stops a call.
"""

import contextlib
import fcntl
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ..regular_files import open_regular

# The age from which a file was left behind by a killed process; a living writer needs milliseconds.
_LEFT_OVER_SECONDS: Final = 3600.0


def cache_file(name: str) -> Path:
    """Return the path of the file `name`: in FUSELAYERS_CACHE, or in XDG_CACHE_HOME/fuselayers.

    Raises:
        RuntimeError: neither is set, and the user has no home.
    """
    own = os.environ.get("FUSELAYERS_CACHE")
    if own:
        return Path(own) / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fuselayers" / name


@contextlib.contextmanager
def locked(path: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold a lock beside a file, which other threads and processes respect here.

    Args:
        path: of the file; the lock has the suffix .lock.
        wait: seconds. A call of a fused function does not wait; the end of `fuselayers tune` can.

    Raises:
        BlockingIOError: another thread or process holds it, and did so during the whole wait.
        OSError: the folder cannot be written, or the lock is a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Nothing is ever written to it, and a link is not followed: somebody else may own this folder.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = path.with_suffix(".lock")
    with open(lock, "ab", opener=lambda name, _: os.open(name, flags, 0o666)) as file:
        end = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise BlockingIOError(f"{lock} is locked by another process; run it again later") from error
            time.sleep(0.02)
        yield


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; {} with a warning where it holds anything else, {} if it is missing."""
    try:
        with open_regular(path) as file:
            content = json.loads(file.read().decode("utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        warnings.warn(
            f"{path} is no file as fuselayers writes it ({error}); it is not used, and the next measurement replaces "
            "it",
            stacklevel=2,
        )
        return {}
    except OSError:  # no such file, or no permission
        return {}
    return content


def warn_of_entries(path: Path, wrong: Sequence[str]) -> None:
    """Warn of entries of a JSON file that do not hold what they should."""
    if wrong:
        warnings.warn(
            f"{path} holds entries that fuselayers does not write, such as {wrong[0][:80]!r}; they are not used, and "
            "the next measurement removes them",
            stacklevel=2,
        )


def write_json(path: Path, content: Any) -> None:
    """Write a file beside `path` and put it in its place; the folder is made if it is not there.

    Raises:
        OSError: it could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_overs(path)
    # Each writer has a file of its own: two threads may write at once.
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def _remove_left_overs(path: Path) -> None:
    for beside in path.parent.glob(f"{path.name}.*.tmp"):
        with contextlib.suppress(OSError):  # another process removed it, or it is a folder
            if time.time() - beside.lstat().st_mtime > _LEFT_OVER_SECONDS:
                beside.unlink()
