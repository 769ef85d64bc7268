import re

import pytest

from fuselayers.cli.main import main
from fuselayers.cli.tune import command, step
from fuselayers.components.model.stack import Stack
from fuselayers.partition import backends
from tests.cli.conftest import TINY_MODEL


@pytest.mark.parametrize("names", [["eager"], pytest.param(["eager", "inductor"], marks=pytest.mark.slow)])
def test_a_model(names: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = [status for status in backends() if status.name in names]
    monkeypatch.setattr(step, "backends", lambda device: statuses)
    assert main(["tune", *TINY_MODEL, "feedforward=mlp", "train.batch_size=2", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"(fusion\S+) .* ([\d.]+) .* [\d.]+ x", printed)
    working = [status.name for status in statuses if status.available]
    assert [override for override, _ in rows] == ["fusion=off", *(f"fusion.backend={name}" for name in working)]
    least = min(float(number) for _, number in rows)
    # Two backends whose printed times are equal are both the fastest.
    assert any(f"to pin the fastest: {name}\n" in printed for name, number in rows if float(number) == least)


def test_a_model_without_example_inputs_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Stack, "example_inputs")
    assert main(["tune", *TINY_MODEL]) == 2
    assert "Decoder of model 'decoder' needs a method example_inputs(" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["my.yaml"], "tune takes a model and overrides, such as gpt_nano norm=rms_norm, got the file my.yaml"),
        (["fusion=off"], "nothing in this model is fused, so there is nothing to choose; set fusion=auto"),
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
