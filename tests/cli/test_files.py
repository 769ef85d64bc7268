import os
from pathlib import Path
from typing import BinaryIO

import pytest

from fuselayers.cli.files import write_whole

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
