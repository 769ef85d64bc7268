"""One process at a time in the folder of a run."""

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from ..files import clear_left_overs

FILE_NAME = "run.lock"


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a run's folder, and remove the temporary files of killed processes there.

    The system releases the lock when the process ends, however it ends. The file stays: another process may already
    wait at it.

    Yields:
        False where the folder's file system has no locks.

    Raises:
        OSError: another process holds the lock, which the text names, or the file cannot be written.
    """
    with open(folder / FILE_NAME, "a+", encoding="utf-8", errors="replace", opener=_open_no_link) as file:
        has_lock = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.readline(200).strip() or "another process"
            raise OSError(f"{folder} is in use by {holder}; let it end, or choose another train.output=") from error
        except OSError:  # some network file systems
            has_lock = False
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
        file.flush()
        if has_lock:
            clear_left_overs(folder)
        yield has_lock


def _open_no_link(path: str, flags: int) -> int:
    # A link would empty its target.
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
