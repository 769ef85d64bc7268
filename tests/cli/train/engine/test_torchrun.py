"""Trainings over the processes of torchrun: the losses of one process, whatever splits the work."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fuselayers.cli.train import train

from .torchrun import curve, overrides, run_all, written_text

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")

_DROPOUT = ("model.dropout=0.1", "attention.dropout=0.1", "feedforward.dropout=0.1")
_LLAMA = ("model=llama_tiny", "attention.num_kv_heads=1", "train.accumulate=2")


def _alone(asked: list[str], folder: Path) -> str:
    output = io.StringIO()
    assert train([*asked, f"train.output={folder}"], console=Console(file=output, width=200)) == 0
    return output.getvalue()


def _assert_same_curve(folder: Path, expected: Path, *, tolerance: float = 2e-6) -> None:
    rows, wanted = curve(folder), curve(expected)
    assert [row.step for row in rows] == [row.step for row in wanted] == [1, 2, 3, 4]
    for row, one in zip(rows, wanted, strict=True):
        assert row.loss == pytest.approx(one.loss, rel=tolerance), row.step
        assert row.gradient_norm == pytest.approx(one.gradient_norm, rel=5 * tolerance), row.step
        assert (row.validation_loss is None) == (one.validation_loss is None) == (row.step % 2 == 1)
        assert (row.validation_loss or 0) == pytest.approx(one.validation_loss or 0, rel=tolerance), row.step


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def ended(root: Path) -> dict[str, dict[str, Any]]:
    """What became of all runs of two processes."""
    text = written_text(root)
    _alone(overrides(text), root / "alone")
    _alone(overrides(text, *_LLAMA), root / "alone_llama")
    _alone(overrides(text, *_LLAMA, "model.num_layers=1"), root / "alone_one_block")
    runs = {
        "ddp": ["parallel=ddp"],
        "fsdp": ["parallel=fsdp", "train.sample_bytes=20", "train.compare=true"],
        "llama_ddp": [*_LLAMA, "parallel=ddp"],
        "llama_fsdp": [*_LLAMA, "parallel=fsdp", "parallel.reshard=false"],
        # Each block is traced; the slow test has two.
        "llama_fused": [
            *_LLAMA,
            "model.num_layers=1",
            *("parallel=fsdp", "fusion=eager", "parallel.checkpointing=budget:0.5"),
        ],
        "tp": ["parallel.tp=2", "parallel.sequence=true"],
        "dropout": ["parallel=fsdp", *_DROPOUT],
        "recomputed": ["parallel=fsdp", *_DROPOUT, "parallel.checkpointing=selective"],
        "small_world": ["parallel=ddp", "parallel.dp=4"],
        "three": ["parallel.tp=3"],
        "no_shard": [],
        "odd_batch": ["parallel=ddp", "train.batch_size=3"],
        "one_device": ["parallel=ddp", "train.device=cuda:0"],
    }
    given = {name: [*overrides(text, *more), f"train.output={root / name}"] for name, more in runs.items()}
    for rank in range(2):
        (root / f"text-{rank}.py").write_text(f"{text.read_text()}# machine {rank}\n")
    given["other_text"] = [*overrides(root / "text-{rank}.py", "parallel=ddp"), f"train.output={root / 'other_text'}"]
    # Stopped by a signal to rank 1, then continued in another layout.
    given["stopped"] = [*overrides(text), "parallel=fsdp", f"train.output={root / 'stopped'}"]
    given["continued"] = [f"train.resume={root / 'stopped'}", "parallel=ddp"]
    return run_all(2, given, events={"stopped": (1, 3, "signal")}, folder=root)


@pytest.mark.parametrize(
    ("name", "expected", "split"),
    [
        ("ddp", "alone", "2 processes, dp 2 x tp 1, DistributedDataParallel with 28 parameters whole, "),
        ("fsdp", "alone", "2 processes, dp 2 x tp 1, FSDP2 with 28 parameters (S(0)), gloo, cpu"),
        ("llama_ddp", "alone_llama", "DistributedDataParallel with "),
        ("llama_fsdp", "alone_llama", "FSDP2 with "),
        ("llama_fused", "alone_one_block", "fsdp gathers the weights of one block at a time: fusion.scope is block"),
        ("tp", "alone", "2 processes, dp 1 x tp 2, Decoder with 9 parameters (S(0)), "),
    ],
)
def test_the_losses_of_one_process(
    ended: dict[str, dict[str, Any]], root: Path, name: str, expected: str, split: str
) -> None:
    assert (ended[name]["code"], ended[name]["refused"]) == (0, "")
    assert split in ended[name]["output"]
    _assert_same_curve(root / name, root / expected)


def test_rank_0_prints_samples_and_writes_alone(ended: dict[str, dict[str, Any]], root: Path) -> None:
    output = ended["fsdp"]["output"]
    assert output.count("validation loss ") == 1
    assert "no comparison of eager with fused: it is of one process, and torchrun started this run" in output
    assert 10 <= len((root / "fsdp" / "sample.txt").read_text()) <= 20
    assert len(list(root.glob("fsdp*"))) == 2  # the run's folder, and what became of it


def test_checkpointing_replays_the_masks(ended: dict[str, dict[str, Any]], root: Path) -> None:
    _assert_same_curve(root / "recomputed", root / "dropout")
    assert curve(root / "dropout")[1].loss != pytest.approx(curve(root / "fsdp")[1].loss, abs=1e-4)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(ended: dict[str, dict[str, Any]], root: Path) -> None:
    assert ended["stopped"]["code"] == 0
    again = f"to continue: torchrun --nproc-per-node 2 -m fuselayers train train.resume={root / 'stopped'}"
    assert f"stopped after step 3; {again}" in ended["stopped"]["output"]
    assert "continuing after step 3" in ended["continued"]["output"]
    assert "DistributedDataParallel" in ended["continued"]["output"]
    _assert_same_curve(root / "stopped", root / "alone")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("small_world", "parallel.dp=4 x parallel.tp=1 need 4 processes, and torchrun started 2; start torchrun "),
        ("three", "parallel.tp=3 needs a multiple of 3 processes, and torchrun started 2; start torchrun --nproc-per-"),
        ("no_shard", "parallel.shard=none trains one copy of the model, and there are 2 processes, 2 of them for data"),
        ("odd_batch", "train.batch_size=3 is split over parallel.dp=2 groups and must be a multiple of 2; take 4"),
        (
            "other_text",
            "rank 1 reads another text than rank 0 in {root}/text-1.py; set data.path= to a file or a folder",
        ),
        ("one_device", "train.device=cuda:0 is one device for 2 processes; leave it at auto, and each takes the GPU"),
    ],
)
def test_a_world_that_does_not_fit_is_refused(
    ended: dict[str, dict[str, Any]], root: Path, name: str, text: str
) -> None:
    assert ended[name]["refused"].startswith(text.replace("{root}", str(root)))
    assert not (root / name).exists()


def test_one_process_splits_nothing_and_says_so(tmp_path: Path) -> None:
    output = _alone(overrides(written_text(tmp_path), "parallel=fsdp", "train.steps=1"), tmp_path / "run")
    assert (
        "one process: parallel.shard=fsdp splits nothing; for two, torchrun --nproc-per-node 2 -m fuselayers" in output
    )


@pytest.mark.slow
def test_what_is_fused_has_the_losses_of_one_process(tmp_path: Path) -> None:
    text = written_text(tmp_path)
    _alone(overrides(text), tmp_path / "alone")
    blocks, model = ["fusion=inductor", "fusion.scope=block"], ["fusion=eager", "fusion.scope=model"]
    runs = {
        "fsdp_blocks": ["parallel=fsdp", *blocks],
        "sequence_blocks": ["parallel.tp=2", "parallel.sequence=true", *blocks],
        "ddp_model": ["parallel=ddp", *model],
        "tp_model": ["parallel.tp=2", *model],
    }
    given = {name: [*overrides(text, *more), f"train.output={tmp_path / name}"] for name, more in runs.items()}
    ended = run_all(2, given, folder=tmp_path)
    for name in runs:
        assert ended[name]["code"] == 0, ended[name]["refused"]
        modules, served_by = (2, "inductor") if name.endswith("blocks") else (1, "eager")
        assert ended[name]["fused"] == {"modules": modules, "served_by": [served_by]}, name
        _assert_same_curve(tmp_path / name, tmp_path / "alone")


@pytest.mark.slow
def test_four_processes_split_data_and_layers(tmp_path: Path) -> None:
    text = written_text(tmp_path)
    _alone(overrides(text), tmp_path / "alone")
    fsdp = ["parallel=fsdp", "parallel.tp=2"]
    runs = {
        "fsdp": ["parallel=fsdp"],
        "fsdp_tp": fsdp,
        "fsdp_tp_sequence": [*fsdp, "parallel.sequence=true"],
        "fsdp_tp_fused": [*fsdp, "fusion.scope=block", "fusion.backend=inductor"],
        "fsdp_tp_dropout": [*fsdp, *_DROPOUT],
        "fsdp_tp_sequence_dropout": [*fsdp, *_DROPOUT, "parallel.sequence=true"],
        "ddp_tp": ["parallel=ddp", "parallel.tp=2"],
    }
    given = {name: [*overrides(text, *more), f"train.output={tmp_path / name}"] for name, more in runs.items()}
    ended = run_all(4, given, folder=tmp_path)
    for name in ("fsdp", "fsdp_tp", "fsdp_tp_sequence", "fsdp_tp_fused"):
        assert ended[name]["code"] == 0
        _assert_same_curve(tmp_path / name, tmp_path / "alone")
    assert ended["fsdp_tp_fused"]["fused"] == {"modules": 2, "served_by": ["inductor"]}
    assert (
        "dp 2 x tp 2, FSDP2 with 9 parameters (_S(0, 2), S(0)), 4 parameters (S(0), S(1))" in ended["fsdp_tp"]["output"]
    )
    assert ended["ddp_tp"]["refused"].startswith("parallel.shard=ddp cannot hold weights that are split by tensor")
    # Two processes of one data-parallel group each: the masks are those of the groups.
    two = tmp_path / "two"
    two.mkdir()
    alone = [*overrides(text, "parallel=fsdp", *_DROPOUT), f"train.output={two / 'fsdp_dropout'}"]
    run_all(2, {"fsdp_dropout": alone}, folder=two)
    for name in ("fsdp_tp_dropout", "fsdp_tp_sequence_dropout"):
        _assert_same_curve(tmp_path / name, two / "fsdp_dropout")
