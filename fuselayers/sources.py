"""A hash of the package's sources, for the keys of caches. `ops` and `partition` use it; it imports nothing of them."""

import functools
import hashlib
from pathlib import Path


@functools.cache
def sources_hash() -> str:
    """Return a hash of the sources that decide on compiled code: what was compiled or measured with others is stale."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for folder in ("_torch", "ops", "partition") for path in package.glob(f"{folder}/**/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
