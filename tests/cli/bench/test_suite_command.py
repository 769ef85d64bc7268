import argparse
import json
import os
import time
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


@pytest.mark.parametrize(("quick", "share_of_ops"), [(True, 1.0), (False, 2 / 3)])
def test_on_a_gpu_everything_is_compiled_before_the_clock_starts(
    quick: bool, share_of_ops: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    deadlines: list[float] = []

    def compiled(calls: Any, *, workers: int, seconds: float, **_: Any) -> None:
        assert (workers, seconds) == (os.cpu_count(), 180.0)
        log.append(calls[0].func.__module__.rpartition(".")[2])

    def measured(chosen: Any, *, deadline: float, **_: Any) -> Suite:
        log.append("ops")
        deadlines.append(deadline)
        return Suite(bandwidth=1.0)

    def models_measured(chosen: Any, suite: Suite, *, deadline: float, **_: Any) -> None:
        log.append(f"{len(chosen)} models")
        deadlines.append(deadline)

    monkeypatch.setattr(suite_command, "compile_ahead", compiled)
    monkeypatch.setattr(suite_command, "measure_suite", measured)
    monkeypatch.setattr(suite_command, "measure_models", models_measured)
    monkeypatch.setattr(suite_command, "measured_machine", lambda device: "an H200")
    arguments = argparse.Namespace(out=str(tmp_path), minutes=3.0, ops=None, dtypes=None, quick=quick, repeats=1)
    now = time.monotonic()
    assert suite_command.run_suite(arguments, Console(quiet=True), device=torch.device("cuda")) == 0
    assert log == ["suite" if quick else "suite_models", "ops", f"{0 if quick else 4} models"]
    assert [one - now for one in deadlines] == pytest.approx([180 * share_of_ops, 180], abs=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --out; see fuselayers bench suite --help"),
        (
            ["--out", "x", "--shape", "4x4"],
            "no option of fuselayers bench suite '--shape'; there are: --device, --dtypes, ",
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
