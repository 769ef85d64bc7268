"""Files that a user names, or that a cache holds: opened only if they are files. It imports nothing of ours."""

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

_KINDS: Final = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading in binary. Opening a FIFO would wait for its writer, and a device may never end.

    Used for config files, training text and cached measurements.

    Raises:
        ValueError: it is a FIFO, a socket or a device.
        OSError: it cannot be opened.
    """
    kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None:
        raise ValueError(f"{path} is {kind}, not a file")
    # It may have been replaced since then; without a writer, a FIFO that is opened so is empty.
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
