import errno
import fcntl
import signal
from pathlib import Path

import pytest

from fuselayers.cli.files import write_whole
from fuselayers.cli.train.lock import locked
from tests.processes import run


def test_a_killed_process_holds_nothing_and_what_it_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from fuselayers.cli.files import write_whole
from fuselayers.cli.train.lock import locked
with locked(Path(sys.argv[1])):
    write_whole(Path(sys.argv[1]) / "a", lambda file: os.kill(os.getpid(), signal.SIGKILL))
"""
    assert run(script, str(tmp_path)).code == -signal.SIGKILL
    assert len(list(tmp_path.glob("a.*.part"))) == 1
    half = tmp_path / "checkpoints" / f"step-000006.{'0123456789abcdef' * 2}.part"
    half.mkdir(parents=True)
    (half / "rank-00000.bin").touch()
    kept = {"b.txt", "mine.part", f"b.{'0' * 32}.parts"}
    for name in kept:
        (tmp_path / name).touch()
    with locked(tmp_path):
        write_whole(tmp_path / "a", lambda file: file.write(b"whole"))
    assert {path.name for path in tmp_path.iterdir()} == {"a", "checkpoints", "run.lock", *kept}
    assert not list((tmp_path / "checkpoints").iterdir())


def test_where_there_are_no_locks_it_says_so_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    half = tmp_path / f"a.{'0' * 32}.part"
    half.touch()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with locked(tmp_path):
        text = f"the file system of {tmp_path} has no locks (No locks available): let only one process write there"
        assert capsys.readouterr().err == f"fuselayers: {text}\n"
    assert half.exists()
