import os
from pathlib import Path
from typing import BinaryIO

import pytest

from fuselayers.cli.files import clear_left_overs, write_whole

_NO_SPACE = OSError(28, "No space left on device")


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_file_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"whole")

    def fail(*arguments: object) -> None:
        raise _NO_SPACE

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        if moment == "write":
            raise _NO_SPACE

    if moment != "write":
        monkeypatch.setattr(os, moment, fail)
    with pytest.raises(OSError, match=f"cannot write {path}: No space left on device"):
        write_whole(path, write)
    assert path.read_bytes() == b"whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def write(file: BinaryIO) -> None:
        file.write(b"first ")
        write_whole(path, lambda other: other.write(b"of the second"))
        file.write(b"to the end")

    write_whole(path, write)
    assert path.read_bytes() == b"first to the end"
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
