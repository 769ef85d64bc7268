import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselayers.cli.main import main
from fuselayers.cli.tune import choices, command
from fuselayers.partition import auto, auto_file
from fuselayers.partition import backends as backends_function
from tests.cli.tune.conftest import TINY

backends: Any = sys.modules[backends_function.__module__]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    monkeypatch.setattr(choices, "_ROUNDS", 3)
    torch.compiler.reset()


def test_a_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # With the backend that compiles nothing; test_choices has the others.
    monkeypatch.setattr(backends, "AUTO_ORDER", ("eager",))
    monkeypatch.setattr(choices, "AUTO_ORDER", ("eager",))
    monkeypatch.setattr(auto, "CANDIDATES", ("eager",))
    assert main(["tune", *TINY, "--batch", "2", "--device", "cpu", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for use in ("training", "forward"):
        assert re.search(
            rf"^Decoder\(.*\) {use} \[\w{{8}}\]: (eager|plain): .*eager [\d.e-]+ ms", printed, re.MULTILINE
        )
        assert re.search(
            rf"^the model, {use}: eager [\d.]+ ms, fused [\d.]+ ms, \d+\.\d\d x as fast$", printed, re.MULTILINE
        )
    assert re.search(r"^to pin these choices: fusion.backend=pinned:eager", printed, re.MULTILINE)
    assert "nothing stored (--dry-run)" in printed
    assert not auto_file().exists()


@pytest.mark.slow
def test_a_model_that_cannot_be_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that draws torch's own random numbers."""
    monkeypatch.setattr(backends, "AUTO_ORDER", ("eager",))
    monkeypatch.setattr(choices, "AUTO_ORDER", ("eager",))
    monkeypatch.setattr(auto, "may_measure", lambda: False)
    assert main(["tune", *TINY, "--batch", "2", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "training: no graph was measured; the first backend stays" in printed
    assert "to pin these choices: fusion.backend=pinned:eager\n" in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["my.yaml"], "tune takes a model and overrides, as gpt_nano norm=rms_norm, got the file my.yaml"),
        (["--batch", "2"], "--batch is a number of examples from 1 on, for a model, got 2"),
        (["model=gpt_nano", "--batch", "0"], "--batch is a number of examples from 1 on, for a model, got 0"),
        (["fusion=off"], "nothing in this model is fused, so there is nothing to choose; take fusion=auto"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *arguments]) == 2
    assert capsys.readouterr().err == f"fuselayers: {text}\n"


def test_without_an_argument_it_is_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(command, "tune_prices", lambda device, **options: asked.append(device.type))
    assert main(["tune", "--device", "cpu"]) == 0
    assert asked == ["cpu"]
