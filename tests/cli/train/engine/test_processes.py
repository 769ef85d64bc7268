import os
import threading
from typing import Any

import pytest
import torch

from fuselayers.cli.train.engine import Processes, joined_processes
from fuselayers.cli.train.engine.processes import _is_a_lost_process, _Launched


def test_without_torchrun_this_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with joined_processes() as group:
        assert type(group) is Processes
        assert (group.is_main, group.launched, group.world_size) == (True, False, 1)
        assert group.from_main([3]) == [3]
        assert not torch.distributed.is_initialized()


def test_the_command_of_several_machines() -> None:
    class Launched(Processes):
        launched = True  # type: ignore[assignment]

    group = Launched()
    group.world_size = group.local_size = 4
    assert group.launcher == "torchrun --nproc-per-node 4"
    group.local_size = 2
    assert group.launcher == "torchrun --nnodes 2 --nproc-per-node 2"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (
            RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]"),
            True,
        ),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("gloo"), False),
    ],
)
def test_a_lost_process_is_told_from_an_error(error: Exception, lost: bool) -> None:
    assert _is_a_lost_process(error) is lost


class _Store:
    def __init__(self, *, failures: int = 0, gone: bool = False) -> None:
        self.failures, self.gone = failures, gone

    def add(self, key: str, number: int) -> int:
        if self.gone:
            raise torch.distributed.DistNetworkError("the server is gone")
        self.failures += number
        return self.failures

    def check(self, keys: list[str]) -> bool:
        return self.failures > 0


def _group(store: _Store) -> Any:
    group: Any = _Launched.__new__(_Launched)
    group.rank, group._store, group._ended = 1, store, threading.Event()
    group._watcher = threading.Thread(target=group._watch, daemon=True)
    return group


def _failed(store: _Store, error: BaseException) -> BaseException:
    group = _group(store)
    group._watcher.start()
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (returned to the test)
        group.failed(error)
    return caught.value


def test_only_the_first_process_that_fails_says_so() -> None:
    store = _Store()
    error = ValueError("the first")
    assert _failed(store, error) is error
    second = _failed(store, ValueError("the second"))
    assert isinstance(second, SystemExit)
    assert second.code == 2
    lost = RuntimeError("gloo: Connection closed by peer")
    text = r"^lost another process of this run, which was killed or whose machine is not reached any more \(gloo:"
    for gone in (_Store(), _Store(gone=True)):
        found = _failed(gone, lost)
        assert isinstance(found, ConnectionError)
        with pytest.raises(ConnectionError, match=text):
            raise found


def test_a_process_that_hangs_in_a_collective_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("fuselayers.cli.train.engine.processes._ASKED_EVERY", 0.01)
    monkeypatch.setattr("fuselayers.cli.train.engine.processes._GRACE", 0.02)
    monkeypatch.setattr(os, "_exit", codes.append)
    group = _group(_Store(failures=1))
    group._watcher.start()
    group._watcher.join(timeout=20)
    assert codes == [2]
