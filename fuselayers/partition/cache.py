"""cache -- the folder in which measurements outlive a process, one JSON file for each kind. Used by machine and choice.

A cache must never hold a half-written file: what is read is either the old content or the new.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["cache_file", "write_json"]


def cache_file(name: str) -> Path:
    """Return where `name` is kept: in FUSELAYERS_CACHE, or in XDG_CACHE_HOME/fuselayers.

    Raises:
        RuntimeError: neither is set, and the user has no home.
    """
    own = os.environ.get("FUSELAYERS_CACHE")
    if own:
        return Path(own) / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fuselayers" / name


def write_json(path: Path, content: Any) -> None:
    """Write a file beside `path` and put it in its place; the folder is made if it is not there.

    Raises:
        OSError: it could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each writer: two threads may write at once.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
    try:
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise
