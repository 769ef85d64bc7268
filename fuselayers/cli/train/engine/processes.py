"""The processes of a run: this one alone, or those that torchrun started.

They agree through a process group: gloo for numbers on the CPU, nccl for tensors on GPUs.
"""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ...text import is_launched

Value = TypeVar("Value")

_FAILED: Final = "fuselayers/failed"
# Seconds: how often a process asks whether another one failed, and how long it may then take to end by itself.
_ASKED_EVERY: Final = 1.0
_GRACE: Final = 10.0
_BAD_INPUT: Final = 2


class Processes:
    """One process alone. Every method has a meaning for several, see `_Launched`.

    Attributes:
        rank: of this process among all, from 0.
        world_size: how many there are.
        local_rank: of this process among those on its machine.
        local_size: how many are on its machine.

    >>> alone = Processes()
    >>> alone.is_main, alone.mean(3.0), alone.largest(2), alone.from_main("a folder")
    (True, 3.0, 2, 'a folder')
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process prints, and writes the files: rank 0."""
        return self.rank == 0

    @property
    def launched(self) -> bool:
        """Whether torchrun, or something like it, started this process."""
        return False

    @property
    def launcher(self) -> str:
        """The command that starts as many processes, as far as this one knows: before `-m fuselayers`."""
        if not self.launched:
            return ""
        nodes = self.world_size // self.local_size
        return f"torchrun {f'--nnodes {nodes} ' if nodes > 1 else ''}--nproc-per-node {self.local_size}"

    def mean(self, value: float) -> float:
        """The mean of the processes' values, the same on each."""
        return value

    def largest(self, number: int) -> int:
        """The largest number of any process."""
        return number

    def from_main(self, value: Value) -> Value:
        """The value of rank 0, on every process."""
        return value

    def first_of(self, value: Value | None) -> Value | None:
        """The smallest value of the processes that have one, on every process."""
        return value


class _Launched(Processes):
    """The processes of torchrun."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.local_rank = (
            int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        # A connection of its own: one that waits for a key would keep the watch from asking.
        self._store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @property
    def launched(self) -> bool:
        return True

    def mean(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.SUM, torch.float64) / self.world_size

    def largest(self, number: int) -> int:
        return int(self._reduced(number, dist.ReduceOp.MAX, torch.int64))

    def from_main(self, value: Value) -> Value:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def first_of(self, value: Value | None) -> Value | None:
        values: list[Value | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return min((one for one in values if one is not None), default=None)  # type: ignore[type-var]

    def _reduced(self, value: float, op: Any, dtype: torch.dtype) -> float:
        # On the CPU, so by gloo: a GPU goes on meanwhile.
        tensor = torch.tensor(value, dtype=dtype)
        dist.all_reduce(tensor, op=op)
        return tensor.item()

    def close(self) -> None:
        """Leave the group, all at the same time. gloo may abort a process that still holds tensors of a group."""
        gc.collect()
        self.largest(0)  # a barrier; that of torch waits on a GPU for nccl
        self._stop_watching()
        dist.destroy_process_group()

    def failed(self, error: BaseException) -> NoReturn:
        """End this process because of an error, its own or the loss of another process; only the first one says so.

        Raises:
            BaseException: the error, or a ConnectionError for a lost process, in the first process that fails.
            SystemExit: in all others.
        """
        self._stop_watching()
        try:
            first = self._store.add(_failed_key(), 1) == 1
        except RuntimeError:  # the process that had the store is gone, and may have been killed without a word
            first = True
        if not first:
            raise SystemExit(_BAD_INPUT) from error
        if _is_a_lost_process(error):
            raise ConnectionError(
                "lost another process of this run, which was killed or whose machine is not reached any more "
                f"({str(error).splitlines()[0]:.200}); continue with train.resume="
            ) from error
        raise error

    def _stop_watching(self) -> None:
        # Python ends a daemon thread by unwinding its stack, and C++ aborts where that meets a call of the store.
        self._ended.set()
        self._watcher.join()

    def _watch(self) -> None:
        # A collective of a healthy process may wait for the failed one for half an hour.
        while not self._ended.wait(_ASKED_EVERY):
            try:
                failed = self._store.check([_failed_key()])
            except RuntimeError:
                return
            if failed:
                if not self._ended.wait(_GRACE):
                    os._exit(_BAD_INPUT)
                return


def _failed_key() -> str:
    # Of this start: the store outlives a start that failed, where torchrun has `--max-restarts`.
    return f"{_FAILED}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@contextmanager
def joined_processes() -> Iterator[Processes]:
    """The processes of this run; they have the same end.

    torchrun sets the variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without RANK and WORLD_SIZE
    this process is alone.

    An error in one process ends all: it is raised there, and the others end with exit code 2, without a word.
    """
    if not is_launched():
        yield Processes()
        return
    group = _Launched()
    try:
        yield group
        group.close()
    except BaseException as error:
        group.failed(error)


def _is_a_lost_process(error: BaseException) -> bool:
    """Whether a collective failed: gloo raises a plain RuntimeError, from a file of its own."""
    named = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(text in str(error) for text in named)
    )
