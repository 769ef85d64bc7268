"""A hash of the package's sources, for cache keys. `ops` and `partition` use it, so it imports neither."""

import functools
import hashlib
from pathlib import Path
from typing import Final

_SOURCES: Final = frozenset({".py", ".cpp", ".h"})


@functools.cache
def sources_hash() -> str:
    """Return a hash of the sources that affect compiled code. Code or timings from other sources are stale."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    folders = (package / name for name in ("_torch", "ops", "partition"))
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in _SOURCES):
        digest.update(path.read_bytes())
    return digest.hexdigest()
