from dataclasses import replace

import pytest

from fuselayers.cli.plan.hardware import GPUS
from fuselayers.cli.plan.layout import Layout
from fuselayers.cli.plan.model import PlannedModel
from fuselayers.cli.plan.search import best_plans, candidates, plan_of

# Room for 20,000 bytes: 92 % of its memory.
SMALL = replace(GPUS["h100"], name="toy GPU", memory=20_000 / 0.92)


def test_utilisation_is_the_models_flops_over_the_peak(model: PlannedModel) -> None:
    plan = plan_of(model, GPUS["h100"], Layout(), gpus=1, batch=2)
    # Products of forward and backward, and attention as if nothing was skipped, three times.
    flops = 3e3 + 4 * 12e3 + 6 * 4e3
    assert plan.utilisation == pytest.approx(2 * flops / plan.time.total / 989e12)
    assert plan.tokens_per_second == pytest.approx(2 * 10 / plan.time.total)


def test_the_batch_is_the_largest_power_of_two_that_fits(model: PlannedModel) -> None:
    plan = plan_of(model, SMALL, Layout(shard="fsdp"), gpus=8, batch=None)
    states, copies, an_example = 16 * 4 * 125 + 16 * 30, 8 * 1000, 100 + 4 * 300
    assert plan.largest_batch == (20_000 - states - copies - 64) // an_example
    assert plan.batch == 2
    assert plan.memory.total <= 20_000


def test_layouts_that_cannot_be_are_not_tried(model: PlannedModel) -> None:
    tried = candidates(model, SMALL, gpus=8)
    assert {layout.tp for layout in tried} == {1, 2, 4}  # 8 does not divide 4 key-value heads
    assert {layout.shard for layout in tried if layout.tp == 1} == {"ddp", "fsdp"}
    assert {layout.shard for layout in tried if layout.tp > 1} == {"fsdp"}
    plans = best_plans(model, SMALL, gpus=8, batch=1)
    speeds = [plan.tokens_per_second for plan in plans]
    assert speeds == sorted(speeds, reverse=True)
    assert all(plan.layout.shard == "fsdp" for plan in plans if plan.layout.tp == 1)
    budgets = best_plans(model, SMALL, gpus=8, batch=1, budget="budget:0.3")
    assert {plan.layout.checkpointing for plan in budgets} == {"budget:0.3"}


def test_nothing_fits_says_by_how_much_and_what_to_change(model: PlannedModel) -> None:
    tiny = replace(SMALL, memory=10_000 / 0.92)
    error = (
        r"toy does not fit with dp 1 none.* and a batch of 1: it needs .* on each GPU, and toy GPU has 0\.0 GB to use"
    )
    with pytest.raises(ValueError, match=error + r".*set parallel\.tp=2 or take more GPUs$"):
        best_plans(model, tiny, gpus=1, batch=1)
