import json
from pathlib import Path

import pytest

from fuselayers.cli.bench.measure import Measured
from fuselayers.cli.bench.report import Report, table, write_folder


def row(candidate: str, forward: float, both: float, *, peak: int | None, kept: int, title: str = "op, a") -> Measured:
    return Measured(
        title=title,
        shape=(2, 4, 8),
        dtype="float16",
        candidate=candidate,
        seconds={"forward": [forward, forward, 9.0], "forward_backward": [both, both, both]},
        peak=peak,
        kept=kept,
        floor={"forward": 1_000_000, "forward_backward": 3_000_000},
    )


@pytest.fixture
def report() -> Report:
    return Report(
        *("a machine", "a day"),
        repeats=3,
        bandwidth=2e9,
        rows=[
            row("plain", 0.002, 0.006, peak=4_000_000, kept=2_000_000),
            row("torch.compile", 0.001, 0.004, peak=3_000_000, kept=1_000_000),
            row("fuselayers", 0.0005, 0.002, peak=2_000_000, kept=8),
            row("plain", 0.004, 0.008, peak=None, kept=0, title="another"),
        ],
        failed={"torch.compile: op, b": "output 0 is off by 1"},
    )


def test_the_table_has_times_bytes_and_what_they_are_relative_to_plain(report: Report) -> None:
    lines = table(report.rows, bandwidth=report.bandwidth)
    assert lines[2] == {
        "": "fuselayers",
        "f ms": "0.500",
        "f x": "4.00 x",
        "fb ms": "2.000",
        "fb x": "3.00 x",
        "+-": "0%",
        "kept MB": "0.00",
        "peak MB": "2.00",
        "bandwidth f": "100%",
        "bandwidth fb": "75%",
    }
    assert lines[3]["f x"] == "1.00 x"
    assert "peak MB" not in lines[3]


def test_a_folder_holds_data_and_a_table(report: Report, tmp_path: Path) -> None:
    files = write_folder(tmp_path, report)
    names = ["results.json", "results.md"]
    assert [path.name for path in files] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    content = json.loads(files[0].read_text())
    assert (content["machine"], content["date"], content["repeats"]) == ("a machine", "a day", 3)
    assert content["rows"][2]["seconds"]["forward"] == [0.0005, 0.0005, 9.0]
    lines = files[1].read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert rows[4][:4] == ["op, a, float16, 2x4x8", "fuselayers", "0.500", "4.00 x"]
    assert len({len(cells) for cells in rows}) == 1
    assert "- torch.compile: op, b: output 0 is off by 1" in lines
