import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fuselayers.partition.cache import cache_file, write_json


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
