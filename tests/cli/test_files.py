import os
from pathlib import Path

import pytest

from fuselayers.cli.files import clear_left_overs, write_text


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_full_disk_leaves_the_file_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    path = tmp_path / "a"
    path.write_text("whole")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, moment, fail)
    with pytest.raises(OSError, match=f"cannot write {path}: No space left on device"):
        write_text(path, "half")
    assert path.read_text() == "whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left = "0123456789abcdef" * 2
    for name in (f"a.txt.{left}.part", "a.txt", "mine.part", f"a.{left}.parts"):
        (tmp_path / name).touch()
    (tmp_path / f"step-000006.{left}.part").mkdir()
    (tmp_path / f"step-000006.{left}.part" / "rank-00000.bin").touch()
    (tmp_path / "step-000005").mkdir()
    clear_left_overs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["a.txt", "mine.part", f"a.{left}.parts", "step-000005"]
    )
