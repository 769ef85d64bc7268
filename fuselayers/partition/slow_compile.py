"""slow_compile -- warn once when compiling takes more than three seconds."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_SECONDS: Final = 3.0
_said = threading.Event()


@contextmanager
def told_when_slow(backend: str, num_nodes: int) -> Iterator[None]:
    """Say after three seconds what compiles, once per process. Used by `compile_chain`."""

    def tell() -> None:
        if not _said.is_set():
            _said.set()
            logging.getLogger("fuselayers").warning(
                "%s compiles a graph of %d operations; later calls with these shapes do not wait. "
                "fusion=off in a config, level='layers' in swap, or no fuse, avoids it",
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
