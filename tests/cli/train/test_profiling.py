import io
import json
import signal
from pathlib import Path

import pytest
from rich.console import Console

from fuselayers.cli.train import train
from fuselayers.cli.train.loop import Trainer, Update
from fuselayers.cli.train.metrics import read_metrics
from fuselayers.configs import compose


def _train(overrides: list[str]) -> str:
    output = io.StringIO()
    assert train(overrides, console=Console(file=output, width=200)) == 0
    return output.getvalue()


def _steps(trace: Path) -> set[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("step ")}


def test_the_named_steps_are_profiled_and_nothing_else_changes(tiny: list[str], tmp_path: Path) -> None:
    overrides = [*tiny, "train.steps=6", "model.dropout=0.1"]
    _train([*overrides, f"train.output={tmp_path / 'plain'}"])
    folder = tmp_path / "run"
    output = _train([*overrides, f"train.output={folder}", "train.profile=2..4"])
    trace, table = folder / "profile_2-4.trace.json", folder / "profile_2-4.txt"
    assert f"profile of steps 2..4: {trace} and {table}\n" in output
    assert _steps(trace) == {"step 2", "step 3", "step 4"}
    rows = [line.split() for line in table.read_text().splitlines() if line.strip().startswith("aten::addmm ")]
    assert len(rows) == 1
    assert int(rows[0][-1]) % 3 == 0  # calls: the same in each of three steps
    assert [row.loss for row in read_metrics(folder / "metrics.csv")] == [
        row.loss for row in read_metrics(tmp_path / "plain" / "metrics.csv")
    ]
    assert not list(folder.glob("*.part"))
    # It belongs to the session: a resumed run does not ask for it again.
    assert compose(folder / "config.yaml").train.profile == ""
    with pytest.raises(ValueError, match=r"^train\.profile must be of steps from 7 to train\.steps=8, .* got 6\.\.7$"):
        _train([f"train.resume={folder}", "train.steps=8", "train.profile=6..7"])
    _train([f"train.resume={folder}", "train.steps=8", "train.profile=8..8"])
    assert _steps(folder / "profile_8-8.trace.json") == {"step 8"}


def test_a_run_that_stops_within_the_range_writes_what_there_is(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def interrupted(trainer: Trainer, number: int) -> Update:
        update = step(trainer, number)
        if number == 3:
            signal.raise_signal(signal.SIGTERM)
        return update

    monkeypatch.setattr(Trainer, "step", interrupted)
    folder = tmp_path / "run"
    arguments = [*tiny, f"train.output={folder}", "train.profile=2..9"]
    assert train(arguments, console=Console(file=io.StringIO())) == 0
    assert _steps(folder / "profile_2-3.trace.json") == {"step 2", "step 3"}


def test_a_step_that_fails_is_in_the_profile(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def fails(trainer: Trainer, number: int) -> Update:
        step(trainer, number)
        raise ValueError("diverged")

    monkeypatch.setattr(Trainer, "step", fails)
    with pytest.raises(ValueError, match=r"^diverged$"):
        _train([*tiny, f"train.output={tmp_path / 'run'}", "train.profile=1..3"])
    assert _steps(tmp_path / "run" / "profile_1-1.trace.json") == {"step 1"}


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ("5", r"train\.profile must be text, got 5; quote it"),
        (
            "a..b",
            r"train\.profile must be the first and the last step, as 10\.\.12 \(one step: 10\.\.10\), got 'a\.\.b'",
        ),
        ("10..9", r"train\.profile must be the first and the last step, as .* got '10\.\.9'"),
        ("'10..12..14'", r"train\.profile must be the first and the last step, as .* got '10\.\.12\.\.14'"),
        ("0..3", r"train\.profile must be of steps from 1 to train\.steps=12, which this session runs, got 0\.\.3"),
        ("12..13", r"train\.profile must be of steps from 1 to train\.steps=12, .* got 12\.\.13"),
    ],
)
def test_wrong_ranges_are_refused_before_anything_is_written(
    tiny: list[str], tmp_path: Path, steps: str, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        _train([*tiny, f"train.output={tmp_path / 'run'}", f"train.profile={steps}"])
    assert not (tmp_path / "run").exists()
