import re
from dataclasses import fields
from pathlib import Path

import pytest

from fuselayers.cli.train.metrics import Metrics, MetricsFile
from tests.cli.train.conftest import read_metrics

_ROWS = [
    Metrics(
        step,
        1 / 3 + step,
        0.1 * step if step % 2 else None,
        1e-3 / step,
        2.0**-step,
        1234.5,
        step / 7,
        10**9 + step,
    )
    for step in range(1, 6)
]


def test_a_damaged_curve_is_repaired_from_the_checkpoints_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(path)
    for row in _ROWS:
        file.append(row)
    file.sync()
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" + content[120:])
    resumed = MetricsFile(path, rows=_ROWS[:3])
    assert resumed.rows == read_metrics(tmp_path) == _ROWS[:3]
    resumed.append(_ROWS[3])
    resumed.append(_ROWS[4])
    assert resumed.rows == read_metrics(tmp_path) == _ROWS
    assert path.read_bytes() == content


def test_the_columns_are_those_of_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    table = page[page.index("| column | meaning |") :].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`", table) == [field.name for field in fields(Metrics)]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(path)
    file.path = Path("/dev/full")
    with pytest.raises(OSError, match=r"cannot write /dev/full: No space left on device; continue with train"):
        file.append(_ROWS[0])
