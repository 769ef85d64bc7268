"""The lock that keeps a second process out of a run's folder."""

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from ..files import clear_left_overs
from ..text import complain
from .checkpoint import checkpoints_of

FILE_NAME = "run.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, and remove half-written files that killed processes left there.

    The system releases the lock when the process ends, however it ends. The file stays: another process may have it
    open.

    Raises:
        OSError: another process holds the lock, which the text names, or the file cannot be written.
    """
    with open(folder / FILE_NAME, "a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.readline(200).strip() or "another process"
            raise OSError(
                f"{folder} is in use by {holder}; wait until it ends, or choose another train.output="
            ) from error
        except OSError as error:  # some network file systems
            complain(f"the file system of {folder} has no locks ({error.strerror}): let only one process write there")
            yield
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
        file.flush()
        clear_left_overs(folder)
        clear_left_overs(checkpoints_of(folder))
        yield
