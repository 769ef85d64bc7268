import os
from pathlib import Path

import pytest

from fuselayers.cli.train.metrics import Metrics, MetricsFile, read_metrics

_ROWS = [
    Metrics(
        step,
        1 / 3 + step,
        0.1 * step if step % 2 else None,
        1e-3 / step,
        2.0**-step,
        1234.5,
        step / 7,
        step / 9 if step != 3 else None,
        10**9 + step,
    )
    for step in range(1, 6)
]


def _write(path: Path) -> None:
    file = MetricsFile(path)
    for row in _ROWS:
        file.append(row)
    file.sync()


def test_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    _write(tmp_path / "metrics.csv")
    assert read_metrics(tmp_path / "metrics.csv") == _ROWS


@pytest.mark.parametrize("damage", ["half a row", "a byte that is no text", "a row less", "all gone", "empty"])
def test_a_damaged_curve_is_repaired_from_the_checkpoints_rows(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metrics.csv"
    _write(path)
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    path.write_bytes(
        {
            "half a row": content + b"6,1.2",
            "a byte that is no text": lines[0] + b"\xff" + b"".join(lines[1:]),
            "a row less": lines[0] + b"".join(lines[2:]),
            "all gone": lines[0],
            "empty": b"",
        }[damage]
    )
    resumed = MetricsFile(path, rows=_ROWS[:3])
    assert resumed.rows == read_metrics(path) == _ROWS[:3]
    resumed.append(_ROWS[3])
    resumed.append(_ROWS[4])
    assert resumed.rows == read_metrics(path) == _ROWS
    assert path.read_bytes() == content == resumed.text().encode()


def test_a_half_row_is_not_read(tmp_path: Path) -> None:
    _write(tmp_path / "metrics.csv")
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("6,1.2")
    assert read_metrics(tmp_path / "metrics.csv") == _ROWS


def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("my,own,table\n1,2,3\n")
    with pytest.raises(ValueError, match=r"is not the curve of a run: its first line must be step,loss,"):
        MetricsFile(path)
    assert path.read_text() == "my,own,table\n1,2,3\n"
    _write(tmp_path / "other.csv")
    with open(tmp_path / "other.csv", "a") as file:
        file.write("six,1.2\n")
    with pytest.raises(ValueError, match=r"cannot read the row six,1\.2"):
        read_metrics(tmp_path / "other.csv")


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"metrics\.csv is a FIFO, not a file$"):
        MetricsFile(path)
    assert path.is_fifo()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(path)
    file.path = Path("/dev/full")
    with pytest.raises(OSError, match=r"cannot write /dev/full: No space left on device; the last checkpoint of"):
        file.append(_ROWS[0])


def test_a_row_with_too_few_columns_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "metrics.csv")
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("6,5.4,5.6,0.002,1.5,1001.0,0.75\n")
    with pytest.raises(ValueError, match=r"cannot read the row 6,5\.4,5\.6"):
        read_metrics(tmp_path / "metrics.csv")
