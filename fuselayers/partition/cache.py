"""cache -- the folder of measurements, with one JSON file for each kind. Used by machine and timings.

A file is replaced as a whole: a reader finds either the old content or the new.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def cache_file(name: str) -> Path:
    """Return the path of the file `name`: in FUSELAYERS_CACHE, or in XDG_CACHE_HOME/fuselayers.

    Raises:
        RuntimeError: neither is set, and the user has no home.
    """
    own = os.environ.get("FUSELAYERS_CACHE")
    if own:
        return Path(own) / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fuselayers" / name


@functools.cache
def sources_hash() -> str:
    """Return a hash of the fusion core and the ops: measurements of other sources do not apply."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted((*package.glob("partition/**/*.py"), *package.glob("ops/**/*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on a file, which other threads and processes wait for here.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_json(path: Path, content: Any) -> None:
    """Write a file beside `path` and put it in its place; the folder is made if it is not there.

    Raises:
        OSError: it could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each writer has a file of its own: two threads may write at once.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
    try:
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise
