import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fuselayers.cli.bench.cases import Settings
from fuselayers.cli.bench.report import Report
from fuselayers.cli.bench.subjects import op_subject
from fuselayers.cli.bench.suite import MODELS, Job, run_suite
from fuselayers.cli.main import main
from fuselayers.components.model.plain_torch import plain_twin
from fuselayers.configs import build

CPU = torch.device("cpu")
SMALL = Settings((2, 3, 64), torch.float32, CPU)


def fails() -> None:
    raise RuntimeError("out of memory\nmore")


@pytest.mark.usefixtures("without_inductor")
def test_a_report_names_what_is_wrong(tmp_path: Path) -> None:
    report, console = Report("a machine", "a day", repeats=2, bandwidth=1e9), Console(file=io.StringIO())
    jobs = [Job("fails", fails), Job("rms_norm", lambda: op_subject("rms_norm", SMALL, backends=()))]
    assert run_suite(jobs, report, folder=tmp_path, device=CPU, console=console) == 1
    assert report.failed == {"fails": "RuntimeError: out of memory"}
    assert [row.candidate for row in report.rows] == ["plain", "torch.compile", "fuselayers"]
    # A stopped run keeps its results.
    content = json.loads((tmp_path / "results.json").read_text())
    assert [row["candidate"] for row in content["rows"]] == ["plain", "torch.compile", "fuselayers"]
    for row in report.rows:
        assert len(row.seconds["forward"]) == 2
        assert 0 < row.median("forward") < row.median("forward_backward")
        assert row.kept > 0
        size = 4 * 2 * 3 * 64
        assert row.floor == {"forward": 2 * size, "forward_backward": 5 * size}


@pytest.mark.slow
def test_one_command_writes_one_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    arguments = ["--ops", "layer_norm,dropout", "--dtypes", "bfloat16", "--quick", "--repeats", "2"]
    assert main(["bench", "suite", "--out", str(folder), *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    files = [str(folder / name) for name in ("results.json", "results.md")]
    assert lines[-4:] == ["dropout, bfloat16, 8x256x512", "layer_norm, bfloat16, 8x256x512", *files]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_twin_of_one_size(name: str) -> None:
    model = build(name, list(MODELS[name][1]))
    assert sum(parameter.numel() for parameter in plain_twin(model).parameters()) == pytest.approx(650_000, rel=0.1)
