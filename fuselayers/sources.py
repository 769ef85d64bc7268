"""A hash of the package's sources, for the keys of caches. `ops` and `partition` use it; it imports nothing of them."""

import functools
import hashlib
from pathlib import Path
from typing import Final

_SOURCES: Final = frozenset({".py", ".cpp", ".h"})


@functools.cache
def sources_hash() -> str:
    """Return a hash of the sources that decide on compiled code: what was compiled or measured with others is stale."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    folders = (package / name for name in ("_torch", "ops", "partition"))
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in _SOURCES):
        digest.update(path.read_bytes())
    return digest.hexdigest()
