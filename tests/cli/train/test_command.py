"""Whole runs, from the overrides to the files."""

import errno
import io
import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
import torch
from rich.console import Console

from fuselayers.cli.train import train
from fuselayers.cli.train.checkpoint import find_checkpoint, newest, read_checkpoint, save, whole_tensors
from fuselayers.cli.train.loop import Trainer, Update
from fuselayers.cli.train.metrics import read_metrics
from fuselayers.cli.train.utilisation import measured_matmul
from fuselayers.configs import build, compose, to_yaml
from fuselayers.configs.costs import model_costs
from tests.cli.conftest import tiny_on, write_text_file
from tests.processes import Program


def _train(overrides: list[str]) -> str:
    output = io.StringIO()
    assert train(overrides, console=Console(file=output, width=200)) == 0
    return output.getvalue()


def _curve(folder: Path) -> list[tuple[object, ...]]:
    """All of the curve that does not depend on the clock."""
    return [
        (row.step, row.loss, row.validation_loss, row.learning_rate, row.gradient_norm)
        for row in read_metrics(folder / "metrics.csv")
    ]


def _files(folder: Path) -> dict[str, bytes]:
    """All but the line that says who is there."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _newest(folder: Path) -> Path:
    path = newest(folder / "checkpoints")
    assert path is not None
    return path


def _step_of(folder: Path) -> int:
    return read_checkpoint(_newest(folder)).step


def _assert_same_state(first: Path, second: Path) -> None:
    assert _step_of(first) == _step_of(second)
    left, right = (whole_tensors(path, read_checkpoint(path)) for path in (_newest(first), _newest(second)))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `tiny` to its end. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    _train([*tiny_on(write_text_file(folder)), f"train.output={folder / 'run'}"])
    return folder / "run"


@pytest.fixture(scope="module")
def rotary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of `tiny` with rotary positions. Tests only read it."""
    folder = tmp_path_factory.mktemp("rotary")
    overrides = tiny_on(write_text_file(folder))
    _train([*overrides, "position=rotary", f"train.output={folder / 'run'}", "train.steps=4"])
    return folder / "run"


@pytest.fixture
def own(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_learns_and_leaves_its_files(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    output = _train(
        [
            *tiny,
            f"train.output={folder}",
            "train.steps=120",
            "train.learning_rate=1e-2",
            "train.sample_bytes=40",
            "train.evaluate_every=40",
        ]
    )
    rows = read_metrics(folder / "metrics.csv")
    assert [row.step for row in rows] == list(range(1, 121))
    assert rows[0].loss == pytest.approx(5.545, abs=0.1)  # ln 256: it knows nothing
    assert rows[-1].validation_loss is not None
    assert rows[-1].validation_loss < 2.7
    assert [row.step for row in rows if row.validation_loss is not None] == [40, 80, 120]
    assert f"validation loss {rows[-1].validation_loss:.4f} nats per byte" in output
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "loss.png",
        "metrics.csv",
        "run.lock",
        "sample.txt",
    ]
    assert matplotlib.image.imread(folder / "loss.png").shape[:2] == (450, 800)
    sample = (folder / "sample.txt").read_text()
    assert 20 <= len(sample) <= 40
    assert all(f"  | {line}" in output for line in sample.splitlines())
    config = compose(str(folder / "config.yaml"))
    assert config.train.steps == 120
    assert config.model.options["hidden_dim"] == 16


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    # With dropout, so that the random numbers count.
    overrides = [*tiny, f"train.accumulate={accumulate}", "model.dropout=0.1"]
    _train([*overrides, f"train.output={tmp_path / 'whole'}"])

    step = Trainer.step

    def killed_in_the_tenth(trainer: Trainer, number: int) -> Update:
        if number == 10:
            raise RuntimeError("killed")
        return step(trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", killed_in_the_tenth)
        with pytest.raises(RuntimeError, match="killed"):
            _train([*overrides, f"train.output={tmp_path / 'parts'}"])
    assert len(_curve(tmp_path / "parts")) == 9
    assert _step_of(tmp_path / "parts") == 8
    torch.manual_seed(999)
    output = _train([f"train.resume={tmp_path / 'parts'}"])

    assert "continuing after step 8" in output
    assert len(_curve(tmp_path / "whole")) == 12
    assert _curve(tmp_path / "parts") == _curve(tmp_path / "whole")
    _assert_same_state(tmp_path / "parts", tmp_path / "whole")


def test_a_run_can_be_made_longer_elsewhere_and_the_first_one_stays(own: Path, tmp_path: Path) -> None:
    before = _files(own)
    _train([f"train.resume={_newest(own)}", "train.steps=16", f"train.output={tmp_path / 'on'}"])
    assert _files(own) == before
    assert _curve(tmp_path / "on")[:12] == _curve(own)
    assert [row[0] for row in _curve(tmp_path / "on")] == list(range(1, 17))


def test_a_run_keeps_as_many_as_asked(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _train([*tiny, f"train.output={folder}", "train.steps=10", "train.keep_checkpoints=3"])
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-000004",
        "step-000008",
        "step-000010",
    ]
    # Its learning rates are those of ten steps; the first eight steps are continued with those of twelve.
    output = _train([f"train.resume={folder / 'checkpoints' / 'step-000004'}", "train.steps=12"])
    assert f"writing {folder}, continuing after step 4" in output
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-000004",
        "step-000008",
        "step-000012",
    ]
    assert [row[0] for row in _curve(folder)] == list(range(1, 13))


def test_a_checkpoint_that_was_copied_elsewhere_begins_a_run_of_its_own(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(_newest(finished), tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    assert "writing runs/" in _train([f"train.resume={copy}", "train.steps=14"])
    (folder,) = (tmp_path / "runs").iterdir()
    assert [row[0] for row in _curve(folder)] == list(range(1, 15))


@pytest.mark.parametrize("way", ["option", "mapping", "quoted", "file", "reference"])
def test_a_run_is_resumed_however_it_is_said(rotary: Path, tmp_path: Path, way: str) -> None:
    folder = shutil.copytree(rotary, tmp_path / "run")
    (tmp_path / "configs" / "train").mkdir(parents=True)
    file = tmp_path / "configs" / "train" / "mine.yaml"
    file.write_text(f"defaults: [quick]\nresume: {folder}\nsteps: 6\ndevice: cpu\ncompare: false\n")
    asked = {
        "option": [f"train.resume={folder}", "train.steps=6"],
        "mapping": [f"train={{resume: '{folder}', steps: 6}}"],
        "quoted": [f"train.resume='{folder}'", "train.steps=6"],
        "file": [f"hydra.searchpath=[{tmp_path / 'configs'}]", "train=mine"],
        "reference": ["train.resume=${train.output}", f"train.output={folder}", "train.steps=6"],
    }[way]
    # gpt_nano has no base: it is an option of the checkpoint's position alone.
    output = _train([*asked, "position.base=10000"])
    assert f"writing {folder}, continuing after step 4" in output
    assert [row[0] for row in _curve(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("attention.num_heads=4", r"attention\.num_heads is 2 there and 4 here"),
        ("model.hidden_dim=32", r"model\.hidden_dim is 16 there and 32 here"),
        ("feedforward.activation=relu", r"feedforward\.activation is gelu there and relu here"),
        ("feedforward=gated_mlp", r"feedforward is mlp there and gated_mlp here"),
        ("norm=rms_norm", r"norm is layer_norm there and rms_norm here"),
        ("train.steps=4", r"is of step 12, beyond train\.steps=4; there is nothing left to train"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(own: Path, override: str, text: str) -> None:
    before = _files(own)
    with pytest.raises(ValueError, match=text):
        _train([f"train.resume={own}", override])
    assert _files(own) == before


def test_a_run_is_not_overwritten(tiny: list[str], own: Path) -> None:
    with pytest.raises(
        FileExistsError, match=rf"already holds a run \(checkpoints/step-000012\); .* train\.resume={own}, or"
    ):
        _train([*tiny, f"train.output={own}"])


def test_a_folder_that_cannot_be_made_is_named(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot make the folder of the run, .*/file/run: Not a directory"):
        _train([*tiny, f"train.output={tmp_path / 'file' / 'run'}"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_and_says_how_to_continue(
    tiny: list[str],
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hangup: None,
    number: signal.Signals,
) -> None:
    step = Trainer.step

    def interrupted(trainer: Trainer, index: int) -> Update:
        update = step(trainer, index)
        if index == 6:
            signal.raise_signal(number)
        return update

    output = io.StringIO()
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        code = train([*tiny, f"train.output={folder}"], console=Console(file=output, width=200))
    assert code == (0 if number == signal.SIGTERM else 128 + number)
    assert _step_of(folder) == 6
    assert f"stopped after step 6; to continue: fuselayers train train.resume={folder}" in output.getvalue()
    assert (folder / "loss.png").exists()
    _train([f"train.resume={folder}"])
    assert _curve(folder) == _curve(finished)
    _assert_same_state(folder, finished)


def test_a_full_disk_in_training_keeps_the_last_checkpoint(
    tiny: list[str], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    rename = os.rename

    def fills_up(source: Path, target: Path) -> None:
        if Path(target).name == "step-000008":
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fills_up)
        text = r"cannot write the checkpoint .*/step-000008: No space left on device; .*train\.resume=.*/step-000004$"
        with pytest.raises(OSError, match=text):
            _train([*tiny, f"train.output={folder}"])
    assert _step_of(folder) == 4
    assert find_checkpoint(str(folder)) == folder / "checkpoints" / "step-000004"
    _train([f"train.resume={folder}"])
    assert _curve(folder) == _curve(finished)
    _assert_same_state(folder, finished)


_LOSES_ITS_OUTPUT = """
import os, sys, torch
from fuselayers.cli.main import main
from fuselayers.cli.train.loop import Trainer
torch.set_num_threads(1)
reads, writes = os.openpty() if sys.argv[1] == "terminal" else os.pipe()
os.dup2(writes, 1)
os.close(writes)
step = Trainer.step
def loses(trainer, number):
    if number == 6:
        os.close(reads)
    return step(trainer, number)
Trainer.step = loses
sys.stdout = open(1, "w", closefd=False)
sys.exit(main(["train", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_run_that_loses_its_output_saves_and_ends(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TERM", "dumb")  # a line per step, where a bar is drawn ten times a second
    folder = tmp_path / "run"
    done = Program(_LOSES_ITS_OUTPUT, kind, *tiny, f"train.output={folder}", "train.evaluate_every=1").wait()
    stopped = f"stopped after step 6; to continue: fuselayers train train.resume={folder}\n"
    assert (done.code, done.errors) == (141, f"fuselayers: the output cannot be written any more; {stopped}")
    assert _step_of(folder) == 6
    assert (folder / "loss.png").exists()


_LOSES_ITS_OUTPUT_AT_THE_END = """
import os, sys
from fuselayers.cli.main import main
from fuselayers.cli.train import command
finish = command._finish
def loses(*arguments, **named):
    reads, writes = os.pipe()
    os.dup2(writes, 1)
    os.close(reads)
    os.close(writes)
    finish(*arguments, **named)
command._finish = loses
sys.stdout = open(1, "w", closefd=False)
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_output_that_is_lost_at_the_end_loses_no_file(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    compared = ("train.compare=true", "train.sample_bytes=3", "feedforward=fused_mlp")
    done = Program(_LOSES_ITS_OUTPUT_AT_THE_END, *tiny, f"train.output={folder}", *compared).wait()
    text = f"fuselayers: the output cannot be written any more; the run has ended, its files are in {folder}\n"
    assert (done.code, done.errors) == (141, text)
    assert (folder / "sample.txt").exists()


def test_two_processes_do_not_write_one_run(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    program = """
import sys, torch
from fuselayers.cli.main import main
torch.set_num_threads(1)
sys.exit(main(sys.argv[1:]))
"""
    overrides = [text for text in tiny if not text.startswith("train.steps")]
    first = Program(program, "train", *overrides, "train.steps=100000", f"train.output={folder}")
    deadline = time.monotonic() + 120
    while newest(folder / "checkpoints") is None and time.monotonic() < deadline:
        time.sleep(0.1)
    second = Program(program, "train", f"train.resume={folder}").wait()
    for refused in ([*tiny, f"train.output={folder}"], [f"train.resume={folder}", f"train.output={folder}"]):
        with pytest.raises(OSError, match=rf"^{folder} is in use by process \d+ on .*; let it end, or choose"):
            _train(refused)
    first.interrupt()
    assert first.wait().code == 130
    assert (second.code, second.errors.count("\n")) == (2, 1)
    assert second.errors.startswith(f"fuselayers: {folder} is in use by process ")
    step = _step_of(folder)
    assert [row[0] for row in _curve(folder)] == list(range(1, step + 1))


def test_a_start_that_wrote_no_checkpoint_is_replaced(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    step = Trainer.step

    def killed_in_the_third(trainer: Trainer, number: int) -> Update:
        if number == 3:
            raise RuntimeError("killed")
        return step(trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", killed_in_the_third)
        with pytest.raises(RuntimeError, match="killed"):
            _train([*tiny, f"train.output={folder}"])
    assert len(_curve(folder)) == 2
    output = _train([*tiny, f"train.output={folder}"])
    assert f"an earlier start in {folder} ended before its first checkpoint: it is replaced\n" in output
    assert [row[0] for row in _curve(folder)] == list(range(1, 13))


def test_a_table_of_the_users_is_not_replaced(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("my,own,table\n")
    with pytest.raises(ValueError, match=r"run/metrics\.csv is not the curve of a run: .*; move the file away"):
        _train([*tiny, f"train.output={tmp_path / 'run'}"])
    assert _files(tmp_path / "run") == {"metrics.csv": b"my,own,table\n"}


def test_a_finished_run_without_its_checkpoints_is_not_replaced(tiny: list[str], own: Path) -> None:
    shutil.rmtree(own / "checkpoints")
    with pytest.raises(FileExistsError, match=r"already holds a run \(loss\.png\)"):
        _train([*tiny, f"train.output={own}"])


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(own: Path, finished: Path) -> None:
    whole, folder = finished, own
    last, previous = folder / "checkpoints" / "step-000012", folder / "checkpoints" / "step-000008"
    content = (last / "rank-00000.bin").read_bytes()
    (last / "rank-00000.bin").write_bytes(content[:5000] + bytes([content[5000] ^ 4]) + content[5001:])
    (folder / "metrics.csv").write_bytes(b"")
    before = _files(folder)
    with pytest.raises(ValueError, match=rf"or a damaged one.* \(step 8\): train\.resume={previous}$"):
        _train([f"train.resume={folder}"])
    assert _files(folder) == before
    assert "continuing after step 8" in _train([f"train.resume={previous}"])
    assert _curve(folder) == _curve(whole)
    _assert_same_state(folder, whole)
    # The damaged one is replaced.
    assert [read_checkpoint(path).step for path in (last, previous)] == [12, 8]


def test_a_run_that_goes_back_to_the_checkpoint_before_keeps_both_until_it_writes(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, previous = own / "checkpoints" / "step-000012", own / "checkpoints" / "step-000008"

    def fails(trainer: Trainer, number: int) -> Update:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", fails)
        with pytest.raises(RuntimeError, match=r"^killed$"):
            _train([f"train.resume={previous}"])
    assert [read_checkpoint(path).step for path in (last, previous)] == [12, 8]


@pytest.mark.parametrize("damage", ["weights", "validation loss"])
def test_a_last_step_without_a_number_is_divergence(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    folder = tmp_path / "run"
    step, validation_loss = Trainer.step, Trainer.validation_loss

    def diverges(trainer: Trainer, number: int) -> Update:
        update = step(trainer, number)
        if number == 12:
            next(trainer.model.parameters()).data[0, 0] = math.nan
        return update

    with monkeypatch.context() as patch:
        if damage == "weights":
            patch.setattr(Trainer, "step", diverges)
            patch.setattr(Trainer, "validation_loss", lambda trainer: 1.0)
            text = r"training diverged at step 12: \S+ holds a NaN or an infinity; a checkpoint, if"
        else:
            patch.setattr(
                Trainer,
                "validation_loss",
                lambda trainer: (
                    math.inf if (folder / "checkpoints" / "step-000008").exists() else validation_loss(trainer)
                ),
            )
            text = r"training diverged at step 12: the validation loss is inf; a checkpoint, if"
        with pytest.raises(ValueError, match=text):
            _train([*tiny, f"train.output={folder}"])
    assert _step_of(folder) == 8


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"config_yaml": "{" * 500},
            r"the config in the checkpoint .* does not compose: config_yaml: line 1 is nested",
        ),
        ({"config_yaml": "train: ["}, r"does not compose: config_yaml: not YAML, line 1: "),
        ({"config_yaml": "- 1"}, r"the config in the checkpoint .* does not compose: "),
        ({"config_yaml": "3"}, r"the config in the checkpoint .* does not compose: config_yaml: a config must be"),
        ({"config_yaml": "a: !!python/name:os.system x"}, r"does not compose: config_yaml: YAML tags are refused"),
        ({"curve": "text"}, r"the curve in the checkpoint .* is not the curve of a run: its first line must be"),
    ],
)
def test_a_checkpoint_with_wrong_contents_is_refused_before_anything_is_written(
    own: Path, change: dict[str, str], text: str
) -> None:
    path = _newest(own)
    checkpoint = read_checkpoint(path)
    save(path.parent, whole_tensors(path, checkpoint), step=12, texts=replace(checkpoint.texts, **change))
    before = _files(own)
    with pytest.raises(ValueError, match=text) as caught:
        _train([f"train.resume={own}"])
    assert len(str(caught.value)) < 600
    assert _files(own) == before


def test_the_end_compares_eager_with_fused_and_changes_nothing(tiny: list[str], tmp_path: Path) -> None:
    compared, not_compared = tmp_path / "compared", tmp_path / "not"
    overrides = [*tiny, "feedforward=fused_mlp", "model.dropout=0.1"]
    output = _train([*overrides, f"train.output={compared}", "train.compare=true"])
    _train([*overrides, f"train.output={not_compared}"])
    result = json.loads((compared / "comparison.json").read_text())
    assert result["loss_difference"] < 1e-5
    assert result["sides"]["fused"]["saved_bytes"] <= result["sides"]["eager layers"]["saved_bytes"]
    assert "tokens/s" in output
    assert "saved for backward" in output
    assert f"torch {torch.__version__}" in output
    assert not (not_compared / "comparison.json").exists()
    # Going on from either gives the same run.
    for folder in (compared, not_compared):
        _train([f"train.resume={folder}", "train.steps=14", "train.compare=false"])
    _assert_same_state(compared, not_compared)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model=bert_base"], r"train needs a model that predicts the next token, a decoder; model\.name is 'encoder'"),
        (
            ["model.vocab_size=100"],
            r"model\.vocab_size must be at least 256 to hold every byte of \S+, got 100; add model\.vocab_size=256",
        ),
        (["data.sequence_length=17"], r"data\.sequence_length must be at most model\.context_length, 16, got 17"),
        (["train.device=toaster"], r"train\.device must be auto, cpu or a GPU that torch can use, got 'toaster'"),
        (
            ["train.resume=/nowhere"],
            r"no checkpoint /nowhere, it is not there; name a run, or a checkpoint such as \S+/step-000200$",
        ),
        (["data.path=/nowhere"], r"cannot read the text: there is no /nowhere"),
        (["train.stepz=3"], r"steps"),
        (["model.num_layers=5000000"], r"the model needs at least [\d,]+ GB of memory, and this machine has"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_is_written(
    tiny: list[str], tmp_path: Path, overrides: list[str], text: str
) -> None:
    with pytest.raises((ValueError, OSError), match=text):
        _train([*tiny, f"train.output={tmp_path / 'run'}", *overrides])
    assert not (tmp_path / "run").exists()


def test_a_config_file_trains_as_it_builds(tiny: list[str], tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(to_yaml(compose("gpt_nano", [*tiny, "train.steps=50"])))
    _train([str(path), "train.steps=2", f"train.output={tmp_path / 'run'}"])
    saved = compose(tmp_path / "run" / "config.yaml")
    assert saved.train.steps == 2
    assert saved.model == compose(path).model == build(path).built_from.model
    with pytest.raises(ValueError, match=r"the config of its checkpoint; leave \S*tiny\.yaml or train\.resume out$"):
        _train([str(path), f"train.resume={tmp_path / 'run'}"])
    with pytest.raises(FileNotFoundError, match=r"cannot read the config file nowhere\.yaml: No such file"):
        _train(["nowhere.yaml"])


def test_the_curve_has_utilisation_and_memory(tiny: list[str], tmp_path: Path) -> None:
    output = _train([*tiny, f"train.output={tmp_path / 'run'}", "train.steps=4"])
    rate = measured_matmul(torch.float32, threads=torch.get_num_threads())
    flops = model_costs("gpt_nano", [text for text in tiny if not text.startswith("data.path")])
    assert f"MFU is the share of {rate / 1e9:,.0f} GFLOP/s, the rate of a float32 matmul measured here" in output
    for row in read_metrics(tmp_path / "run" / "metrics.csv"):
        assert row.model_flops_utilisation == pytest.approx(
            row.tokens_per_second * flops.training_flops_per_token / rate
        )
        assert row.peak_memory_bytes > 100e6  # Python with torch
    assert "  peak memory " in output
