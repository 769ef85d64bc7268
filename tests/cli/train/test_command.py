"""Whole runs, from the overrides to the files."""

import dataclasses
import errno
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

from fuselayers.cli.main import main
from fuselayers.cli.train.checkpoint import read_checkpoint, whole_tensors
from fuselayers.cli.train.loop import Trainer
from fuselayers.configs import build, compose, to_yaml
from fuselayers.partition import machine_of
from fuselayers.partition.choose.machine import write_tuned
from tests.cli.train.conftest import (
    assert_same_run,
    before_step,
    curve,
    files,
    killed,
    newest,
    read_metrics,
    run_train,
)
from tests.processes import Program


def test_a_run_leaves_its_files(finished: Path) -> None:
    printed = (finished.parent / "printed.txt").read_text()
    rows = read_metrics(finished)
    assert [row.step for row in rows] == list(range(1, 13))
    assert rows[0].loss == pytest.approx(math.log(256), abs=0.1)  # it has learnt nothing yet
    assert rows[-1].loss < rows[0].loss
    assert [row.step for row in rows if row.validation_loss is not None] == [4, 8, 12]
    assert f"validation loss {rows[-1].validation_loss:.4f} nats per byte" in printed
    names = {"checkpoints", "config.yaml", "loss.png", "metrics.csv", "run.lock", "sample.txt"}
    assert {path.name for path in finished.iterdir()} == names
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == ["step-000008", "step-000012"]
    assert matplotlib.image.imread(finished / "loss.png").shape[:2] == (450, 800)
    assert printed.endswith(f"the curve of the loss: {finished / 'loss.png'}\n")
    sample = (finished / "sample.txt").read_text()
    assert 20 <= len(sample) <= 40
    assert all(f"  | {line}" in printed for line in sample.splitlines())
    assert rows[-1].peak_memory_bytes > 100e6  # Python with torch


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(finished: Path, resumed: Path) -> None:
    assert "continuing after step 8" in (resumed.parent / "printed.txt").read_text()
    assert_same_run(resumed, finished)
    assert (resumed / "sample.txt").read_text() == (finished / "sample.txt").read_text()


def test_tensorboard_has_the_curve_of_both_sessions_once(resumed: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(resumed / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    rows = read_metrics(resumed)
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (row.step, pytest.approx(row.loss, rel=1e-6)) for row in rows
    ]
    assert [event.step for event in events.Scalars("validation_loss")] == [4, 8, 12]


def test_the_config_of_a_run_builds_the_model_of_its_checkpoint(finished: Path) -> None:
    model: Any = build(finished / "config.yaml")
    model.load_state_dict(whole_tensors(newest(finished), prefix="model."))
    assert "$" not in (finished / "config.yaml").read_text()
    assert compose(finished / "config.yaml").train.accumulate == 2


def test_a_file_of_measured_prices_is_named(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    path = write_tuned("cpu", dataclasses.replace(machine_of("cpu"), name="measured: this machine"))
    ended = [f"train.resume={newest(finished)}", f"train.output={tmp_path / 'on'}", "fusion=eager"]
    printed = run_train(ended)
    assert f"what is saved is chosen by the prices of measured: this machine, from {path}\n" in printed
    assert "prices" not in (finished.parent / "printed.txt").read_text()


def test_a_run_can_be_made_longer_elsewhere_and_the_first_one_stays(finished: Path, tmp_path: Path) -> None:
    before = files(finished)
    printed = run_train(
        [f"train.resume={newest(finished)}", "train.steps=16", f"train.output={tmp_path / 'on'}", "parallel=fsdp"]
    )
    assert files(finished) == before
    assert "one process, so fsdp splits nothing; torchrun starts more" in printed
    assert curve(tmp_path / "on")[:12] == curve(finished)
    assert [row[0] for row in curve(tmp_path / "on")] == list(range(1, 17))


def test_a_run_goes_back_to_an_older_checkpoint_and_keeps_as_many_as_asked(own: Path, finished: Path) -> None:
    older = own / "checkpoints" / "step-000008"
    # A kill before the first new checkpoint leaves both.
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 9, killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_train([f"train.resume={older}"])
    assert newest(own).name == "step-000012"
    printed = run_train([f"train.resume={older}", "train.checkpoint_every=2", "train.keep_checkpoints=3"])
    assert f"writing {own}, continuing after step 8" in printed
    names = ["step-000008", "step-000010", "step-000012"]
    assert sorted(path.name for path in (own / "checkpoints").iterdir()) == names
    assert_same_run(own, finished)


def test_a_checkpoint_that_was_copied_elsewhere_begins_a_run_of_its_own(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(newest(finished), tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    assert "writing runs/" in run_train([f"train.resume={copy}", "train.steps=14"])
    (folder,) = (tmp_path / "runs").iterdir()
    assert [row[0] for row in curve(folder)] == list(range(1, 15))


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("attention.num_heads=4", r"^a run resumed from \S+ cannot change attention; remove its overrides, or start"),
        ("norm=rms_norm", "cannot change norm; remove its overrides"),
        ("train.steps=4", r"is of step 12, beyond train\.steps=4; raise train.steps, or"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(finished: Path, override: str, text: str) -> None:
    before = files(finished)
    with pytest.raises(ValueError, match=text):
        run_train([f"train.resume={finished}", override])
    assert files(finished) == before


def test_an_existing_run_is_not_overwritten(tiny: list[str], own: Path) -> None:
    for held in ("checkpoints/step-000008", "loss.png"):
        before = files(own)
        text = rf"already holds a run \({held}\); continue it with train\.resume={own}, or"
        with pytest.raises(FileExistsError, match=text):
            run_train([*tiny, f"train.output={own}"])
        assert files(own) == before
        shutil.rmtree(own / "checkpoints", ignore_errors=True)


def test_a_start_that_wrote_no_checkpoint_is_replaced(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [*tiny, f"train.output={tmp_path / 'run'}"]
    with monkeypatch.context() as patch:
        before_step(patch, 3, killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_train(asked)
    run_train(asked)
    assert [row[0] for row in curve(tmp_path / "run")] == list(range(1, 13))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_and_says_how_to_continue(
    own: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, hangup: None, number: signal.Signals
) -> None:
    with monkeypatch.context() as patch:
        before_step(patch, 10, lambda trainer: signal.raise_signal(number))
        asked = [f"train.resume={own / 'checkpoints' / 'step-000008'}"]
        printed = run_train(asked, code=0 if number == signal.SIGTERM else 128 + number)
    assert read_checkpoint(newest(own)).step == 10
    assert f"stopped after step 10; to continue:\n  fuselayers train train.resume={own}" in printed
    run_train([f"train.resume={own}"])
    assert_same_run(own, finished)


def test_a_full_disk_in_training_keeps_the_last_checkpoint(
    own: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def fills_up(source: Path, target: Path) -> None:
        if Path(target).name == "step-000012":
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    older = own / "checkpoints" / "step-000008"
    shutil.rmtree(own / "checkpoints" / "step-000012")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fills_up)
        text = r"cannot write the checkpoint .*/step-000012: No space left on device; earlier checkpoints are intact: "
        with pytest.raises(OSError, match=text):
            run_train([f"train.resume={older}"])
    assert list((own / "checkpoints").iterdir()) == [older]
    run_train([f"train.resume={own}"])
    assert_same_run(own, finished)


_PROGRAM = """
import runpy
runpy.run_module("fuselayers", run_name="__main__", alter_sys=True)
"""


def test_two_processes_do_not_write_one_run_and_ctrl_c_saves(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = Program(_PROGRAM, "train", *tiny, "train.steps=100000", f"train.output={folder}")
    deadline = time.monotonic() + 120
    while not list(folder.glob("checkpoints/step-??????")) and time.monotonic() < deadline:
        time.sleep(0.1)
    for refused in ([*tiny, f"train.output={folder}"], [f"train.resume={folder}"]):
        with pytest.raises(OSError, match=rf"^{folder} is in use by process \d+ on .*; wait until it ends, or"):
            run_train(refused)
    first.send(signal.SIGINT)
    done, step = first.wait(), read_checkpoint(newest(folder)).step
    assert (done.code, done.errors) == (130, "")
    again = f"to continue:\n  fuselayers train train.resume={folder}"
    assert done.printed.endswith(f"stopped after step {step}; {again}\n")
    assert [row[0] for row in curve(folder)] == list(range(1, step + 1))


@pytest.mark.parametrize("file", ["shard-00001-model-00001-of-00001.safetensors", "manifest.json"])
def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    file: str, own: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own / "checkpoints" / "step-000012"
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 4
    (path / file).write_bytes(content)
    (own / "metrics.csv").write_bytes(b"")
    text = f"{path} is not a checkpoint of fuselayers, or is damaged: the checksum of {file} is wrong"
    with pytest.raises(ValueError, match=f"^{text}$"):
        run_train([f"train.resume={path}"])
    assert "continuing after step 8" in run_train([f"train.resume={own}"])
    assert capsys.readouterr().err == f"fuselayers: {text}; trying the previous checkpoint\n"
    assert_same_run(own, finished)


@pytest.mark.parametrize("number", ["loss", "weights", "validation loss"])
def test_a_number_that_is_not_finite_is_divergence(number: str, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(trainer: Trainer) -> None:
        next(trainer.model.parameters()).data[:] = math.nan

    with monkeypatch.context() as patch:
        if number == "validation loss":
            patch.setattr(Trainer, "validation_loss", lambda trainer: math.inf)
            text = r"training diverged at step 12: the validation loss is inf; checkpoints, if any, are from"
        elif number == "loss":
            before_step(patch, 10, spoil)
            text = r"training diverged at step 10: the loss is nan and the norm of its gradient is nan; checkpoints,"
        else:
            patch.setattr(Trainer, "validation_loss", lambda trainer: spoil(trainer) or 1.0)
            text = r"training diverged at step 12: blocks\.0\.attention\.qkv\.weight is nan; checkpoints, if any, are"
        shutil.rmtree(own / "checkpoints" / "step-000012")
        with pytest.raises(ValueError, match=text):
            run_train([f"train.resume={own}"])
    assert newest(own).name == "step-000008"


def test_the_end_compares_plain_eager_and_fused(tiny: list[str], tmp_path: Path) -> None:
    fused = ["feedforward=fused_mlp", "model.dropout=0.1", "fusion=eager", "train.compare=true", "train.steps=4"]
    printed = run_train([*tiny, *fused, f"train.output={tmp_path / 'run'}"])
    result = json.loads((tmp_path / "run" / "comparison.json").read_text())
    kept = {row["candidate"]: row["kept"] for row in result["rows"]}
    assert list(kept) == ["plain", "eager layers", "fused", "fused, int8"]
    assert result["loss_difference"] < 1e-5
    assert result["plain_difference"] < 1e-5
    assert kept["fused, int8"] < kept["fused"] <= kept["eager layers"]
    assert result["compile_seconds"] > 0
    for text in ("kept MB", "compiling took", f"torch {torch.__version__}"):
        assert text in printed


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model=bert_base"], r"train needs a model that predicts the next token, a decoder; model\.name is 'encoder'"),
        (
            ["model.vocab_size=100"],
            r"model\.vocab_size must be at least 256 to hold every byte of \S+, got 100; add model\.vocab_size=256",
        ),
        (["data.sequence_length=17"], r"data\.sequence_length must be at most model\.context_length, 16, got 17"),
        (["train.resume=/nowhere"], r"no checkpoint /nowhere: it is no folder; name a run that has saved one"),
        (["data.path=/nowhere"], r"cannot read the text: there is no /nowhere"),
        (["train.log=[tensorbord]"], r"^no train\.log\[0\] 'tensorbord'; did you mean 'tensorboard'\?"),
        (["train.output=/dev/null/run"], r"Not a directory: '/dev/null/run'"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_is_written(
    tiny: list[str], tmp_path: Path, overrides: list[str], text: str
) -> None:
    with pytest.raises((ValueError, OSError), match=text):
        run_train([*tiny, f"train.output={tmp_path / 'run'}", *overrides])
    assert not (tmp_path / "run").exists()


def test_a_missing_tensorboard_is_named(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    text = r"^train\.log=\[tensorboard\] needs the package tensorboard, which cannot be imported: .*; pip install tenso"
    with pytest.raises(ValueError, match=text):
        run_train([*tiny, f"train.output={tmp_path / 'run'}", "train.log=[tensorboard]"])


def test_a_run_without_matplotlib_ends_without_its_picture(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run_train([*tiny, f"train.output={tmp_path / 'run'}", "train.steps=2"])
    said = "no loss.png: a picture needs matplotlib; install it with: pip install matplotlib"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run" / "loss.png").exists()


def test_a_config_file_trains_as_it_builds(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(to_yaml(compose("gpt_nano", [*tiny, "train.steps=50"])))
    assert main(["train", str(path), "train.steps=2", f"train.output={tmp_path / 'run'}"]) == 0
    assert compose(tmp_path / "run" / "config.yaml").model == compose(path).model
    assert main(["train", str(path), f"train.resume={tmp_path / 'run'}"]) == 2
    assert "a resumed run uses the config of its checkpoint; leave " in capsys.readouterr().err
