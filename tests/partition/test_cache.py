import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fuselayers.partition.cache import cache_file, locked, read_json, write_json


def test_the_folder_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    assert cache_file("a.json") == tmp_path / "a.json"
    monkeypatch.delenv("FUSELAYERS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_file("a.json") == tmp_path / "xdg" / "fuselayers" / "a.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_file("a.json") == tmp_path / "home" / ".cache" / "fuselayers" / "a.json"


def test_a_file_is_whole_whoever_else_writes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    contents = [{"writer": number, "text": "x" * 10_000} for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda content: write_json(path, content), contents))
    assert json.loads(path.read_text()) in contents
    assert [one.name for one in path.parent.iterdir()] == ["a.json"]


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(OSError, match=r"a\.json"):
        write_json(tmp_path / "a.json", {})
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_nothing_is_left_of_what_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(tmp_path / "a.json", {"a": {1}})
    assert not list(tmp_path.iterdir())


def test_files_that_a_killed_process_left_are_removed_when_they_are_old(tmp_path: Path) -> None:
    old, new, foreign = (tmp_path / name for name in ("a.json.1x.tmp", "a.json.2x.tmp", "b.json.1x.tmp"))
    for path in (old, new, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (0, 0))
    write_json(tmp_path / "a.json", {})
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.json", "a.json.2x.tmp", "b.json.1x.tmp"]


def test_the_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    """It was opened for writing, which emptied the file that it led to."""
    precious = tmp_path / "precious"
    precious.write_text("text")
    (tmp_path / "a.lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "a.json"):
        pass
    assert precious.read_text() == "text"


def test_a_lock_keeps_what_its_file_holds(tmp_path: Path) -> None:
    (tmp_path / "a.lock").write_text("text")
    with locked(tmp_path / "a.json"):
        pass
    assert (tmp_path / "a.lock").read_text() == "text"


def test_a_lock_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.lock")
    with pytest.raises(OSError, match=r"a\.lock"), locked(tmp_path / "a.json"):
        pass


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_what_is_no_file_is_not_opened(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO was waited for; /dev/zero never ends."""
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    path = Path("a.json")
    with socket.socket(socket.AF_UNIX) as bound:
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "socket":
            bound.bind(str(path))
        else:
            path.symlink_to("/dev/zero")
        with pytest.warns(UserWarning, match=rf"\(a\.json is a {kind}, not a file\); it is not used, and the next"):
            assert read_json(path) == {}
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
