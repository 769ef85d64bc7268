import re
from typing import Any

import pytest

from fuselayers.cli.plan.layout import Layout, fitted, parse_layout

MODEL: dict[str, Any] = {"heads": 12, "kv_heads": 4, "tokens": 10}


def test_data_parallel_groups_are_what_tensor_parallelism_leaves() -> None:
    layout = fitted(parse_layout({"tp": "2", "shard": "fsdp", "sequence": "true"}), gpus=16, **MODEL)
    assert layout == Layout(dp=8, tp=2, sequence=True, shard="fsdp")
    assert str(layout) == "dp 8 fsdp, tp 2 + sequence"


@pytest.mark.parametrize(
    ("layout", "gpus", "error"),
    [
        (Layout(tp=3), 8, "parallel.tp=3 does not divide gpus=8; choose one of 1, 2, 4, 8"),
        (Layout(tp=8), 8, "parallel.tp=8 must divide the heads of the attention, which has 12; choose one of 1, 2, 3"),
        (Layout(tp=6), 6, "must divide the key-value heads of the attention, which has 4; choose one of 1, 2, 4"),
        (Layout(dp=3, tp=2, shard="ddp"), 8, "parallel.dp=3 x parallel.tp=2 is 6 GPUs, and gpus=8; leave parallel.dp"),
        (Layout(), 2, "parallel.shard=none is for one data-parallel group, and there are 2; set ddp or fsdp"),
        (Layout(sequence=True), 1, "parallel.sequence=true needs a tensor-parallel group, and parallel.tp is 1"),
        (Layout(tp=4, sequence=True), 4, "spreads the 10 tokens of an example over parallel.tp=4 GPUs, which does not"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_numbers(layout: Layout, gpus: int, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        fitted(layout, gpus=gpus, **MODEL)


def test_a_model_without_heads_has_no_tensor_parallelism() -> None:
    with pytest.raises(ValueError, match=r"the heads of the attention, which has none; leave parallel\.tp out"):
        fitted(Layout(tp=2), gpus=2, heads=None, kv_heads=None, tokens=10)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"pp": "2"}, "no parallel option 'pp';"),
        ({"tp": "0"}, "parallel.tp must be a number of GPUs, got '0'"),
        ({"sequence": "yes"}, "parallel.sequence must be true or false, got 'yes'"),
        ({"shard": "zero"}, "no parallel.shard 'zero'; there are: ddp, fsdp, none"),
        ({"checkpointing": "full"}, "no parallel.checkpointing 'full'; there are: block, budget:0.5, none, selective"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, str], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        parse_layout(settings)
