import io
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from fuselayers.cli.train import train
from fuselayers.cli.train.loop import Trainer, Update
from fuselayers.cli.train.metrics import read_metrics
from fuselayers.cli.train.sinks import check_sinks


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


def test_a_writer_that_fails_is_given_up_and_the_run_goes_on(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    add_scalar, folder = SummaryWriter.add_scalar, tmp_path / "run"

    def fails(writer: SummaryWriter, name: str, value: float, global_step: int) -> None:
        if global_step == 3:
            raise OSError("No space left on device")
        add_scalar(writer, name, value, global_step=global_step)

    monkeypatch.setattr(SummaryWriter, "add_scalar", fails)
    _train([*tiny, f"train.output={folder}", "train.log=[tensorboard]"])
    assert capsys.readouterr().err == (
        "fuselayers: tensorboard takes no more numbers of this run: No space left on device; metrics.csv has them all\n"
    )
    assert len(_columns(folder)["loss"]) == 12


def test_an_error_of_closing_does_not_end_the_run(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def fails(writer: SummaryWriter) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(SummaryWriter, "close", fails)
    _train([*tiny, f"train.output={tmp_path / 'run'}", "train.log=[tensorboard]"])
    assert "tensorboard takes no more numbers of this run: No space left on device" in capsys.readouterr().err


def test_a_missing_package_is_named_before_anything_is_written(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    text = (
        r"^train\.log=\[tensorboard\] needs the package tensorboard, which cannot be imported: .*; pip install tensorb"
    )
    with pytest.raises(ValueError, match=text):
        _train([*tiny, f"train.output={tmp_path / 'run'}", "train.log=[tensorboard]"])
    assert not (tmp_path / "run").exists()


def test_a_folder_of_the_packages_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"cannot be imported: there is only a folder tensorboard; pip install"):
        check_sinks(["tensorboard"])
    sys.modules.pop("tensorboard")


def test_an_unknown_sink_is_refused(tiny: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^no train\.log\[0\] 'tensorbord'; did you mean 'tensorboard'\? there are: "):
        _train([*tiny, "train.log=[tensorbord]"])
