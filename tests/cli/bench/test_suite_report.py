import json
import re
import sys
from pathlib import Path

import pytest

from fuselayers.cli.bench.suite import Measured, Suite
from fuselayers.cli.bench.suite_report import table, write_report


def row(candidate: str, forward: float, both: float, *, peak: int | None, kept: int, title: str = "op, a") -> Measured:
    return Measured(
        title=title,
        shape=(2, 4, 8),
        dtype="float16",
        candidate=candidate,
        seconds={"forward": [forward, forward, 9.0], "forward_backward": [both, both, 9.0]},
        peak=peak,
        kept=kept,
        floor={"forward": 1_000_000, "forward_backward": 3_000_000},
    )


@pytest.fixture
def suite() -> Suite:
    return Suite(
        bandwidth=2e9,
        rows=[
            row("eager", 0.002, 0.006, peak=4_000_000, kept=2_000_000),
            row("torch.compile", 0.001, 0.004, peak=3_000_000, kept=1_000_000),
            row("fuselayers", 0.0005, 0.002, peak=2_000_000, kept=8),
            row("eager", 0.004, 0.008, peak=None, kept=0, title="another"),
        ],
        failed={"Liger: op, a, float16": "output 0 is off by 1"},
        left_out=["op, b, float16"],
    )


def test_the_table_says_ratios_to_eager(suite: Suite) -> None:
    text = table(suite, said="a machine, a day")
    lines = text.splitlines()
    assert lines[2].startswith("a machine, a day. Eager in milliseconds")
    assert "(2 GB/s)" in lines[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert rows[0][4:8] == ["torch.compile f", "torch.compile fb", "fuselayers f", "fuselayers fb"]
    ratios = ["2.00", "1.50", "4.00", "3.00"]
    assert rows[2] == ["op, a", "2x4x8", "2.000", "6.000", *ratios, "0.50", "2.00", "0.00", "100%", "75%"]
    assert rows[3] == ["another", "2x4x8", "4.000", "8.000", "", "", "", "", "", "0.00", "", "", ""]
    assert "- Liger: op, a, float16: output 0 is off by 1" in lines
    assert "- op, b, float16" in lines
    assert len({len(cells) for cells in rows}) == 1


def test_a_folder_holds_data_table_and_pictures(suite: Suite, tmp_path: Path) -> None:
    files = write_report(tmp_path, suite, machine="a machine", date="a day", repeats=3)
    names = ["results.json", "results.md", "results_forward_float16.svg", "results_forward_backward_float16.svg"]
    assert [path.name for path in files] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    content = json.loads(files[0].read_text())
    assert (content["machine"], content["date"], content["repeats"], content["bandwidth"]) == (
        "a machine",
        "a day",
        3,
        2e9,
    )
    assert content["rows"][2]["seconds"]["forward"] == [0.0005, 0.0005, 9.0]


def test_without_matplotlib_the_data_is_written_all_the_same(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    files = write_report(tmp_path, suite, machine="a machine", date="a day", repeats=3)
    assert [path.name for path in files] == ["results.json", "results.md"]
    assert "no pictures: a picture needs matplotlib; install it with: pip install" in capsys.readouterr().err


def test_a_picture_has_the_ops_in_the_order_of_their_gain(suite: Suite, tmp_path: Path) -> None:
    suite.rows += [
        row("eager", 0.003, 0.006, peak=None, kept=0, title="best"),
        row("fuselayers", 0.0001, 0.001, peak=None, kept=0, title="best"),
    ]
    path = write_report(tmp_path, suite, machine="a machine", date="a day", repeats=3)[2]
    texts = [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())]
    # From the bottom up; an op that nobody is compared in has no bars.
    assert [text for text in texts if text in ("op, a", "best", "another")] == ["op, a", "best"]
    assert {"4.00", "30.00", "2.00", "eager", "fuselayers", "torch.compile"} <= set(texts)
    assert "forward, float16: times as fast as eager PyTorch" in texts
    # Without a ground, it reads in a light and a dark page.
    assert "#ffffff" not in path.read_text()
