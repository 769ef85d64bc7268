"""slow_compile -- warn when a compilation takes more than three seconds."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_SECONDS: Final = 3.0


@contextmanager
def told_when_slow(backend: str, num_nodes: int) -> Iterator[None]:
    """Log a warning if the block takes more than three seconds. Used by `compile_chain`, at each compilation."""

    def tell() -> None:
        logging.getLogger("fuselayers").warning(
            "%s compiles a graph of %d operations; later calls with these shapes do not wait. "
            "To avoid the wait, set fusion=off in a config, use level='layers' in swap, or leave fuse out",
            backend,
            num_nodes,
        )

    timer = threading.Timer(_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
