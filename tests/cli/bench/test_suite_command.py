import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fuselayers.cli.bench import suite_command
from fuselayers.cli.bench.suite import Suite
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
            "results_forward_bfloat16.svg",
            "results_forward_backward_bfloat16.svg",
        )
    ]
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert {(row["title"], tuple(row["shape"])) for row in rows} == {
        ("dropout", (8, 256, 512)),
        ("layer_norm", (8, 256, 512)),
    }


def test_on_a_gpu_everything_is_compiled_before_the_clock_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def compiled(chosen: Any, *, workers: int, minutes: float, **_: Any) -> None:
        assert (workers, minutes) == (os.cpu_count(), 3.0)
        log.append("compiled")

    def measured(chosen: Any, **_: Any) -> Suite:
        log.append("measured")
        return Suite(bandwidth=1.0)

    monkeypatch.setattr(suite_command, "compile_ahead", compiled)
    monkeypatch.setattr(suite_command, "measure_suite", measured)
    monkeypatch.setattr(suite_command, "measured_machine", lambda device: "an H200")
    arguments = argparse.Namespace(out=str(tmp_path), minutes=3.0, ops=None, dtypes=None, quick=True, repeats=1)
    assert suite_command.run_suite(arguments, Console(quiet=True), device=torch.device("cuda")) == 0
    assert log == ["compiled", "measured"]


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
