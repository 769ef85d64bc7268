import json
from pathlib import Path

import pytest

from fuselayers.cli.main import main


@pytest.mark.slow
def test_one_command_writes_one_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    arguments = ["--ops", "layer_norm,dropout", "--dtypes", "bfloat16", "--quick", "--repeats", "2"]
    assert main(["bench", "suite", "--out", str(folder), *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[1:3] == ["dropout, bfloat16", "layer_norm, bfloat16"]
    assert lines[3:] == [
        str(folder / name)
        for name in (
            "results.json",
            "results.md",
            "results_forward_bfloat16.png",
            "results_forward_backward_bfloat16.png",
        )
    ]
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert {(row["title"], tuple(row["shape"])) for row in rows} == {
        ("dropout", (8, 256, 512)),
        ("layer_norm", (8, 256, 512)),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "bench suite needs a folder for what it measures: --out DIR"),
        (
            ["--out", "x", "--shape", "4x4"],
            "bench suite takes no --shape; it takes device, dtypes, minutes, ",
        ),
        (["--out", "x", "--minutes", "0"], "--minutes must be above 0, got 0"),
        (
            ["--out", "x", "--ops", "dropuot"],
            "no op of bench suite 'dropuot'; did you mean 'dropout'? there are: bias_",
        ),
        (["--out", "x", "--dtypes", "float64"], "no dtype of bench suite 'float64'; did you mean 'float16'"),
    ],
)
def test_errors(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "suite", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_found_out_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "suite", "--out", str(tmp_path / "file")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "File exists" in captured.err
