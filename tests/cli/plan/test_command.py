import json
import re
from typing import Any

import pytest

from fuselayers.cli.main import main
from fuselayers.cli.plan import command
from fuselayers.cli.plan.command import read_arguments
from fuselayers.cli.plan.model import PlannedModel
from tests.cli.conftest import TINY_MODEL


@pytest.fixture
def counted(model: PlannedModel, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """In the place of traces, which take seconds; holds what was asked for."""
    asked: dict[str, Any] = {}

    def planned_model(config: Any, **options: Any) -> PlannedModel:
        asked.update(options, config=config)
        return model

    monkeypatch.setattr(command, "planned_model", planned_model)
    return asked


def test_words_of_the_plan_are_no_overrides() -> None:
    words = ["model=gpt2_small", "gpus=16", "gpu=h200", "budget=0.25", "parallel.tp=2", "batch=4"]
    asked = read_arguments(words)
    assert asked.overrides == ["model=gpt2_small", "parallel.tp=2"]
    assert (asked.gpus, asked.gpu, asked.budget, asked.batch) == (16, "h200", "budget:0.25", 4)
    assert asked.has_layout


def test_prints_the_best_layouts(counted: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=gpt_nano", "gpus=8", "data.sequence_length=64"]) == 0
    out = capsys.readouterr().out
    assert "toy: 4,200 parameters, 4 layers, bfloat16" in out
    assert "8 x NVIDIA H100 SXM5 80 GB, 92% of 80 GB to use" in out
    assert "dp 8 fsdp" in out
    assert max(map(len, out.splitlines())) <= 80
    assert counted["precision"] == "bfloat16"
    assert counted["config"].data.sequence_length == 64


def test_one_layout_as_json(counted: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpus=8", "gpu=a100", "parallel.tp=2", "parallel.shard=fsdp", "budget=0.3", "train.precision=float32"]
    assert main(["plan", "model=gpt_nano", *words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["parameters"] == 4200
    (plan,) = content["plans"]
    assert plan["layout"] == {"dp": 4, "tp": 2, "sequence": False, "shard": "fsdp", "checkpointing": "budget:0.3"}
    assert plan["memory"]["total"] == sum(size for part, size in plan["memory"].items() if part != "total")
    assert counted["precision"] == "float32"
    assert "budget:0.3" in counted["checkpointing"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["gpu=h1000"], "no gpu 'h1000'; did you mean 'h100'? there are: a100, b200, cpu, h100, h200, mi300x"),
        (["gpus=none"], "gpus must be a number from 1 on, got 'none'"),
        (["budget=2"], "budget must be a share of what eager mode saves, as 0.5, got '2'"),
        (["gpus=6", "parallel.tp=4"], "parallel.tp=4 does not divide gpus=6; choose one of 1, 2, 3, 6"),
        (["gpu=cpu", "gpus=2"], "gpu=cpu is this machine, one device; leave gpus=2 out, or name a GPU"),
        (["parallel.shard=zero"], "parallel.shard"),
        (["--check"], "--check measures this machine's CPU; add gpu=cpu"),
        (["train.batch_size=8"], "train.batch_size is of all data-parallel groups; a plan takes batch=, that of each"),
        (["parallel.shard=fsdp", "batch=100000000"], "toy does not fit with dp 1 fsdp and a batch of"),
    ],
)
def test_errors_say_what_to_change(
    words: list[str], error: str, counted: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "model=gpt_nano", *words]) == 2
    assert re.search(re.escape(error), capsys.readouterr().err)


@pytest.mark.slow
def test_a_model_is_counted_and_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=gpt_nano", *TINY_MODEL, "model.num_layers=3", "gpus=2"]) == 0
    out = capsys.readouterr().out
    assert "3 layers, bfloat16" in out
    assert "fuse, min_cut" in out
    assert "dp 2 fsdp" in out
