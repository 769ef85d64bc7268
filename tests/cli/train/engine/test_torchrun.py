"""Trainings by torchrun have the losses of a single process, however the work is split."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import write_text_file
from tests.cli.train.conftest import read_metrics, run_train

from .torchrun import ended, overrides, run_all, start

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")

_DROPOUT = ("model.dropout=0.1", "attention.dropout=0.1", "feedforward.dropout=0.1")
Ended = dict[str, dict[str, Any]]


def _alone(asked: list[str], folder: Path) -> None:
    run_train([*asked, f"train.output={folder}"])


def _assert_same_curve(folder: Path, expected: Path, *, tolerance: float = 2e-6) -> None:
    rows, wanted = read_metrics(folder), read_metrics(expected)
    assert [row.step for row in rows] == [row.step for row in wanted] == [1, 2, 3, 4]
    for row, other in zip(rows, wanted, strict=True):
        assert row.loss == pytest.approx(other.loss, rel=tolerance), row.step
        assert row.gradient_norm == pytest.approx(other.gradient_norm, rel=5 * tolerance), row.step
        assert (row.validation_loss is None) == (other.validation_loss is None) == (row.step % 2 == 1)
        assert (row.validation_loss or 0) == pytest.approx(other.validation_loss or 0, rel=tolerance), row.step


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="session")
def results(root: Path) -> Ended:
    """The results of all runs on two processes."""
    text = write_text_file(root)
    _alone(overrides(text), root / "alone")
    runs = {
        "ddp": ["parallel=ddp"],
        "fsdp": ["parallel=fsdp", "train.sample_bytes=20", "train.compare=true"],
        "tp": ["parallel.tp=2", "parallel.sequence=true"],
        "diverged": ["parallel=fsdp"],
        "stopped": ["parallel=fsdp"],
    }
    asked = {name: overrides(text, *more) for name, more in runs.items()}
    for rank in range(2):
        (root / f"text-{rank}.py").write_text(f"{text.read_text()}# machine {rank}\n")
    asked["other_text"] = overrides(root / "text-{rank}.py", "parallel=ddp")
    # Stopped by a signal, then continued in another layout.
    asked["continued"] = [f"train.resume={root / 'stopped'}", "parallel=default", "parallel.tp=2"]
    return run_all(2, asked, events={"stopped": "signal", "diverged": "weight"}, folder=root)


@pytest.mark.parametrize(
    ("name", "wrapper", "placement"),
    [
        ("ddp", "DistributedDataParallel", "whole"),
        ("fsdp", "FSDPDecoder", "(Shard(dim=0),)"),
        ("tp", "Decoder", "(Shard(dim=1),)"),
    ],
)
def test_the_losses_of_one_process(results: Ended, root: Path, name: str, wrapper: str, placement: str) -> None:
    assert (results[name]["code"], results[name]["refused"]) == (0, "")
    assert results[name]["wrapper"] == wrapper
    assert placement in results[name]["placements"]
    _assert_same_curve(root / name, root / "alone")


def test_rank_0_prints_samples_and_writes_alone(results: Ended, root: Path) -> None:
    output = results["fsdp"]["output"]
    assert "2 processes, dp 2 x tp 1, shard fsdp" in output
    assert output.count("validation loss ") == 1
    assert "no comparison of eager with fused: torchrun started this run" in output
    assert 10 <= len((root / "fsdp" / "sample.txt").read_text()) <= 20
    # Each process wrote its part of the checkpoint.
    assert len(list((root / "fsdp" / "checkpoints" / "step-000004").glob("shard-*"))) == 2


def test_a_signal_to_one_rank_stops_all_and_another_layout_continues(results: Ended, root: Path) -> None:
    assert results["stopped"]["code"] == 0
    again = f"to continue:\n  torchrun ... -m fuselayers train train.resume={root / 'stopped'}"
    assert f"stopped after step 3; {again}" in results["stopped"]["output"]
    assert "continuing after step 3" in results["continued"]["output"]
    _assert_same_curve(root / "stopped", root / "alone")
    # One process continues from the checkpoint of two, each of which wrote half of every layer.
    run_train([f"train.resume={root / 'tp'}", "train.steps=5", "parallel=default"])
    assert [row.step for row in read_metrics(root / "tp")] == [1, 2, 3, 4, 5]


def test_a_number_that_goes_wrong_on_one_rank_stops_all(results: Ended, root: Path) -> None:
    text = "training diverged at step 3: the loss is nan and the norm of its gradient is nan; checkpoints, if any, are"
    assert results["diverged"]["refused"].startswith(text)
    assert [row.step for row in read_metrics(root / "diverged")] == [1, 2]


def test_processes_that_read_different_texts_are_refused(results: Ended, root: Path) -> None:
    text = "the processes read different texts; set data.path= to a file or a folder that all machines see"
    assert results["other_text"]["refused"].startswith(text)
    assert not (root / "other_text").exists()


@pytest.mark.slow
def test_four_processes_split_data_and_layers(tmp_path: Path) -> None:
    text = write_text_file(tmp_path)
    _alone(overrides(text), tmp_path / "alone")
    fsdp = ["parallel=fsdp", "parallel.tp=2"]
    runs = {
        "fsdp": ["parallel=fsdp"],
        "fsdp_tp": fsdp,
        "fsdp_tp_sequence": [*fsdp, "parallel.sequence=true"],
        "fsdp_tp_fused": [*fsdp, "fusion.scope=block", "fusion.backend=inductor"],
        "fsdp_fused": [
            *("parallel=fsdp", "parallel.reshard=false", "parallel.checkpointing=budget:0.5"),
            *("fusion=eager", "fusion.scope=model"),
        ],
    }
    drops = ["parallel=fsdp", *_DROPOUT]
    asked = {name: overrides(text, *more) for name, more in runs.items()}
    # FSDP2 over four processes runs the first half, FSDP2 with tensor parallelism the second.
    asked["dropout"] = overrides(text, *drops)
    asked["recomputed"] = overrides(text, *drops, "parallel.checkpointing=selective")
    asked["half"] = overrides(text, "parallel=fsdp")
    asked["other_half"] = [f"train.resume={tmp_path / 'half'}", *fsdp]
    results = run_all(4, asked, events={"half": "signal"}, folder=tmp_path)
    for name in (*runs, "half"):
        assert results[name]["code"] == 0, results[name]
        _assert_same_curve(tmp_path / name, tmp_path / "alone")
    assert results["fsdp_tp_fused"]["fused"] == ["inductor"]
    assert results["fsdp_fused"]["fused"] == ["eager"]
    # One graph of the whole model would need all of its weights at once.
    assert "fusion scope block" in results["fsdp_fused"]["output"]
    _assert_same_curve(tmp_path / "recomputed", tmp_path / "dropout")
    dropped, kept = (read_metrics(tmp_path / name)[1].loss for name in ("dropout", "fsdp"))
    assert dropped != pytest.approx(kept, abs=1e-4)


# For `--import`: rank 1 fails in its third step, while rank 0 waits for its gradient.
_FAILS = """
import os, signal
from fuselayers.cli.train.loop import Trainer

losses, calls = Trainer.loss, []

def loss(trainer, *batch):
    calls.append(batch)
    if os.environ["RANK"] == "1" and len(calls) == 6:  # one was of the validation
        {failure}
    return losses(trainer, *batch)

Trainer.loss = loss
"""


@pytest.mark.slow
@pytest.mark.parametrize("failure", ['raise OSError("the disk is full")', "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_process_that_fails_or_is_killed_ends_all_in_a_line(failure: str, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(_FAILS.format(failure=failure))
    asked = [*overrides(write_text_file(tmp_path)), "parallel=fsdp", f"train.output={tmp_path / 'run'}"]
    program = ended(start(2, "-m", "fuselayers", "train", *asked, "--import", "failing", folder=tmp_path))
    assert program.returncode == 1, program.stderr  # torchrun's own code
    said = [line for line in program.stderr.splitlines() if line.startswith("fuselayers, rank ")]
    lost = "fuselayers, rank 0: lost another process, whose own error says why ("
    assert any(line.startswith(lost) for line in said if "rank 0" in line) or len(said) == 1, said
    if "OSError" in failure:
        assert "fuselayers, rank 1: the disk is full" in said
    assert "fuselayers/cli" not in program.stderr  # the traceback in torchrun's report is torchrun's own
    assert [row.step for row in read_metrics(tmp_path / "run")] == [1, 2]
