import re
from typing import Any

import pytest

from fuselayers.cli.plan.layout import Layout, fitted, layout_of
from fuselayers.configs import compose

MODEL: dict[str, Any] = {"heads": 12, "kv_heads": 4}


def test_data_parallel_groups_are_what_tensor_parallelism_leaves() -> None:
    parallel = compose("gpt_nano", ["parallel=fsdp", "parallel.tp=2", "parallel.sequence=true"]).parallel
    layout = fitted(layout_of(parallel), gpus=16, **MODEL)
    assert layout == Layout(dp=8, tp=2, sequence=True, shard="fsdp")
    assert str(layout) == "dp 8 fsdp, tp 2 + sequence"


@pytest.mark.parametrize(
    ("layout", "gpus", "error"),
    [
        (Layout(tp=3), 8, "parallel.tp=3 does not divide gpus=8; choose one of 1, 2, 4, 8"),
        (Layout(tp=8), 8, "parallel.tp=8 must divide the heads of the attention, which has 12; choose one of 1, 2, 3"),
        (Layout(tp=6), 6, "must divide the key-value heads of the attention, which has 4; choose one of 1, 2, 4"),
        (Layout(dp=3, tp=2, shard="fsdp"), 8, "parallel.dp=3 x parallel.tp=2 is 6 GPUs, and gpus=8; leave parallel.dp"),
        (Layout(), 2, "parallel.shard=none is for one data-parallel group, and there are 2; set ddp or fsdp"),
        (Layout(tp=2, shard="ddp"), 8, "parallel.shard=ddp cannot hold weights that parallel.tp=2 divides; set"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_numbers(layout: Layout, gpus: int, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        fitted(layout, gpus=gpus, **MODEL)


def test_a_model_without_heads_has_no_tensor_parallelism() -> None:
    with pytest.raises(ValueError, match=r"the heads of the attention, which has none; leave parallel\.tp out"):
        fitted(Layout(tp=2), gpus=2, heads=None, kv_heads=None)


def test_a_budget_of_bytes_is_refused() -> None:
    parallel = compose("gpt_nano", ["parallel.checkpointing=budget:9000"]).parallel
    with pytest.raises(ValueError, match=r"a plan takes a budget as a share .* as budget:0\.5, got 'budget:9000'"):
        layout_of(parallel)
