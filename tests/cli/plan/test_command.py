import re

import pytest

from fuselayers.cli.main import main
from fuselayers.cli.plan.command import read_arguments
from fuselayers.hardware import GPUS
from tests.cli.conftest import TINY_MODEL


def test_words_of_the_plan_are_no_overrides() -> None:
    words = [
        "model=gpt2_small",
        "gpus=16",
        "gpu=h100_pcie",
        "parallel.checkpointing=budget:0.25",
        "parallel.tp=2",
        "batch=4",
        "efficiency=0.4",
    ]
    overrides, options = read_arguments(words)
    assert overrides == ["model=gpt2_small", "parallel.checkpointing=budget:0.25", "parallel.tp=2"]
    assert options == {"gpus": 16, "gpu": GPUS["H100 PCIe"], "batch": 4, "efficiency": 0.4}


def test_prints_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=gpt_nano", *TINY_MODEL, "gpus=8", "gpu=h200"]) == 0
    out = capsys.readouterr().out
    assert "7,664 parameters, 1 blocks, bfloat16" in out
    assert "8 x H200: dp 8 fsdp, batch 32" in out
    assert re.search(r"sent by a GPU: all-gather .* kB, reduce-scatter .* kB", out)
    assert "at 46% of the GPU's rates" in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["gpu=h1000"], "no gpu 'h1000'; did you mean 'h100'"),
        (["gpu=cpu"], "no gpu 'cpu'; there are: a100"),
        (["gpus=none"], "gpus must be a whole number of at least 1, got 'none'"),
        (["efficiency=2"], "efficiency must be a share, above 0 and at most 1, such as 0.5, got '2'"),
        (
            ["parallel.checkpointing=budget:9000"],
            "parallel.checkpointing is a number of bytes, 'budget:9000'; a plan takes a share, such as budget:0.5",
        ),
        (
            ["parallel.checkpointing=budget:peak:2GB"],
            "parallel.checkpointing is a number of bytes, 'budget:peak:2GB'; a plan takes a share, such as budget:0.5",
        ),
        (["parallel.shard=zero"], "parallel.shard"),
        (
            ["train.batch_size=8"],
            "train.batch_size counts all data-parallel groups; set batch=, the examples of each group",
        ),
    ],
)
def test_errors_say_what_to_change(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=gpt_nano", *TINY_MODEL, *words]) == 2
    assert re.search(re.escape(error), capsys.readouterr().err)
