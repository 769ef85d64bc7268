import os
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

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


def test_an_error_of_the_disk_inside_torch_save_is_named(tmp_path: Path) -> None:
    """torch.save reports a failed write as a RuntimeError about positions in a zip file."""

    class FullDisk:
        def write(self, content: bytes) -> int:
            raise _NO_SPACE

    with pytest.raises(OSError, match="No space left on device"):
        write_whole(tmp_path / "a", lambda file: torch.save({"x": torch.zeros(9)}, FullDisk()))  # type: ignore[arg-type]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def write(file: BinaryIO) -> None:
        file.write(b"first ")
        write_whole(path, lambda other: other.write(b"of the second"))
        file.write(b"to the end")

    write_whole(path, write)
    assert path.read_bytes() == b"first to the end"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_the_newest_file_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that looks for it between two renames must find it, or it takes the folder for an empty one."""
    path, keep = tmp_path / "newest", tmp_path / "previous"
    path.write_text("first")
    keep.write_text("older")
    replace, seen = os.replace, []

    def watched(source: Path, target: Path) -> None:
        replace(source, target)
        seen.append(path.read_text())

    monkeypatch.setattr(os, "replace", watched)
    write_whole(path, lambda file: file.write(b"second"), keep=keep)
    assert seen == ["first", "second"]
    assert keep.read_text() == "first"
    assert sorted(tmp_path.iterdir()) == [path, keep]
