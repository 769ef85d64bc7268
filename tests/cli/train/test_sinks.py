import io
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from fuselayers.cli.train import train
from fuselayers.cli.train.loop import Trainer, Update
from fuselayers.cli.train.metrics import read_metrics
from fuselayers.cli.train.sinks import TensorBoard, check_sinks


def _train(overrides: list[str]) -> str:
    output = io.StringIO()
    assert train(overrides, console=Console(file=output, width=200)) == 0
    return output.getvalue()


def _killed_in_the_tenth(patch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def killed(trainer: Trainer, number: int) -> Update:
        if number == 10:
            raise RuntimeError("killed")
        return step(trainer, number)

    patch.setattr(Trainer, "step", killed)


def _columns(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The curve by column, as float32, which TensorBoard stores."""
    rows = [asdict(row) for row in read_metrics(folder / "metrics.csv")]
    return {
        name: [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows if row[name] is not None]
        for name in rows[0]
        if name != "step"
    }


def _events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_has_the_curve_of_a_run_that_was_killed_and_resumed(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        _killed_in_the_tenth(patch)
        with pytest.raises(RuntimeError, match="killed"):
            _train([*tiny, f"train.output={folder}", "train.log=[tensorboard]"])
    assert [step for step, _ in _events(folder)["loss"]] == list(range(1, 10))
    _train([f"train.resume={folder}"])
    # Step 9 of the killed session is there once, as in the curve.
    assert _events(folder) == _columns(folder)
    assert [step for step, _ in _events(folder)["validation_loss"]] == [4, 8, 12]


def test_a_sink_that_is_added_later_gets_the_steps_before(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _train([*tiny, "train.steps=4", f"train.output={folder}"])
    assert not (folder / "tensorboard").exists()
    _train([f"train.resume={folder}", "train.steps=6", "train.log=[tensorboard]"])
    assert _events(folder) == _columns(folder)
    assert len(_columns(folder)["loss"]) == 6


class _Run:
    def __init__(self, module: "_Wandb", arguments: dict[str, Any]) -> None:
        self.arguments, self.rows, self.metrics, self.finished = arguments, list[dict[str, Any]](), {}, False
        self._module = module

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.metrics[name] = step_metric

    def log(self, row: dict[str, Any]) -> None:
        if self._module.fails_at == row["step"]:
            raise RuntimeError("no network")
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


class _Wandb(ModuleType):
    """The part of wandb's public interface that is used: `init`, and of its run `define_metric`, `log`, `finish`."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__file__ = "wandb/__init__.py"
        self.runs: list[_Run] = []
        self.fails_at: int | None = None
        self.refuses = False

    def init(self, *, project: str, name: str, id: str, resume: str, dir: str, config: dict[str, Any]) -> _Run:
        if self.refuses:
            raise RuntimeError("api_key not configured (no-tty)")
        arguments = {"project": project, "name": name, "id": id, "resume": resume, "dir": dir, "config": config}
        self.runs.append(_Run(self, arguments))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> _Wandb:
    module = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_weights_and_biases_continues_the_run_of_the_folder(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: _Wandb
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        _killed_in_the_tenth(patch)
        with pytest.raises(RuntimeError, match="killed"):
            _train([*tiny, f"train.output={folder}", "train.log=[wandb]"])
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    _train([f"train.resume={folder}"])
    first, second = wandb.runs
    assert first.finished
    assert second.finished
    assert first.arguments["project"] == "fuselayers"
    assert first.arguments["config"]["train"]["steps"] == 12
    assert second.arguments == {**first.arguments, "project": "mine"}
    assert first.arguments["resume"] == "allow"
    assert (first.arguments["name"], first.arguments["dir"]) == ("run", str(folder))
    assert len(first.arguments["id"]) == 16
    # The step is a number of its own, since W&B takes no row twice at one of its own steps.
    assert first.metrics == second.metrics == {"*": "step"}
    assert [row["step"] for row in first.rows] == list(range(1, 10))
    wanted = [asdict(row) for row in read_metrics(folder / "metrics.csv")]
    assert second.rows == [
        {name: value for name, value in row.items() if value is not None} for row in wanted if row["step"] > 8
    ]


def test_another_folder_is_another_run(tiny: list[str], tmp_path: Path, wandb: _Wandb) -> None:
    for name in ("one", "two"):
        _train([*tiny, "train.steps=4", f"train.output={tmp_path / name}", "train.log=[wandb]"])
    assert len({run.arguments["id"] for run in wandb.runs}) == 2


def test_weights_and_biases_that_cannot_start_ends_the_run_before_its_first_step(
    tiny: list[str], tmp_path: Path, wandb: _Wandb
) -> None:
    wandb.refuses = True
    text = (
        r"^train\.log=\[wandb\]: Weights & Biases cannot start: api_key .*; call `wandb login`, set WANDB_MODE=offline"
    )
    with pytest.raises(ValueError, match=text):
        _train([*tiny, f"train.output={tmp_path / 'run'}", "train.log=[wandb]"])
    assert read_metrics(tmp_path / "run" / "metrics.csv") == []


def test_a_sink_that_fails_is_dropped_and_the_run_goes_on(
    tiny: list[str], tmp_path: Path, wandb: _Wandb, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb.fails_at = 3
    folder = tmp_path / "run"
    _train([*tiny, f"train.output={folder}", "train.log=[wandb,tensorboard]"])
    assert capsys.readouterr().err == (
        "fuselayers: wandb takes no more numbers of this run: no network; metrics.csv has them all\n"
    )
    assert [row["step"] for row in wandb.runs[0].rows] == [1, 2]
    assert _events(folder) == _columns(folder)


def test_an_error_of_closing_a_sink_does_not_end_the_run(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(sink: TensorBoard) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(TensorBoard, "close", fails)
    _train([*tiny, f"train.output={tmp_path / 'run'}", "train.log=[tensorboard]"])
    assert "tensorboard takes no more numbers of this run: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_written(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    text = rf"^train\.log=\[{name}\] needs the package {name}, which cannot be imported: .*; pip install {name}$"
    with pytest.raises(ValueError, match=text):
        _train([*tiny, f"train.output={tmp_path / 'run'}", f"train.log=[{name}]"])
    assert not (tmp_path / "run").exists()


def test_a_folder_of_the_packages_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"cannot be imported: there is only a folder wandb; pip install wandb"):
        check_sinks(["wandb"])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def test_an_unknown_sink_is_refused(tiny: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^no train\.log\[0\] 'tensorbord'; did you mean 'tensorboard'\? there are: "):
        _train([*tiny, "train.log=[tensorbord]"])
