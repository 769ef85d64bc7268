from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselayers.cli.main import main
from fuselayers.cli.tune import choices, command
from fuselayers.cli.tune.choices import Row
from fuselayers.cli.tune.turns import Ratio
from fuselayers.partition import auto, auto_file
from fuselayers.partition import backends as backends_function
from tests.cli.tune.conftest import TINY
from tests.partition.measured import eager_for_inductor

backends: Any = __import__("sys").modules[backends_function.__module__]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    monkeypatch.setattr(choices, "in_turns", lambda eager, auto, device: Ratio(1.25, 1.2, 1.375))
    torch.compiler.reset()


def test_a_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # With the backend that compiles nothing; test_choices has the others.
    monkeypatch.setattr(backends, "AUTO_ORDER", ("eager",))
    monkeypatch.setattr(auto, "CANDIDATES", ("eager",))
    assert main(["tune", *TINY, "--batch", "2", "--device", "cpu", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("model decoder") == 4
    assert "against eager: the time of the same function op by op" in printed
    assert "to have the same choice in every run: fusion.backend=frozen:" in printed
    assert "nothing kept (--dry-run)" in printed
    assert not auto_file().exists()


def test_ops(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    eager_for_inductor(monkeypatch)
    monkeypatch.setattr(choices, "OPS", {"rms_norm": choices.OPS["rms_norm"]})
    assert main(["tune", "ops", "--shape", "2x3x16", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("rms_norm 2x3x16") == 4  # a line for each use, and a row of the table
    assert "ops in float32, dropout 0.1" in printed
    assert "1.250 x (1.200 to 1.375)" in printed
    assert auto_file().exists()


@pytest.mark.parametrize("again", [False, True])
def test_a_second_choice_is_marked(
    again: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row("wave 8", "training", {"eager": 0.25}, "eager", Ratio(1.25, 1.2, 1.375), "0a0b0c0d", again=again)

    def tuned(shapes: object, *, say: Callable[[Row], None], **options: object) -> list[Row]:
        say(row)
        return [row]

    monkeypatch.setattr(command, "tune_ops", tuned)
    assert main(["tune", "ops", "--device", "cpu"]) == 0
    said, line = (line for line in capsys.readouterr().out.splitlines() if "wave 8" in line)
    assert said == f"wave 8, training: eager{' (again)' if again else ''}, 1.250 x (1.200 to 1.375)"
    assert ("eager (again)" in line) is again


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gpt_nano"], "tune takes ops, or overrides such as model=gpt_nano, got gpt_nano"),
        (["ops", "model=gpt_nano"], "tune takes ops, or overrides such as model=gpt_nano, got ops model=gpt_nano"),
        (["--batch", "2"], "--batch is a number of examples from 1 on, for a model, got 2"),
        (["model=gpt_nano", "--batch", "0"], "--batch is a number of examples from 1 on, for a model, got 0"),
        (["--shape", "2x3"], "--shape goes with ops: fuselayers tune ops --shape 8x256x512"),
        (["ops", "--shape", "2x-3"], "--shape must be sizes from 1 on, as in 8x256x512, got '2x-3'"),
        (["fusion=off"], "nothing in this model is fused, so there is nothing to choose; take fusion=auto"),
    ],
)
def test_what_does_not_fit_is_said(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *arguments]) == 2
    assert capsys.readouterr().err == f"fuselayers: {text}\n"


def test_without_an_argument_it_is_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(command, "tune_prices", lambda device, **options: asked.append(device.type))
    assert main(["tune", "--device", "cpu"]) == 0
    assert asked == ["cpu"]
