import pytest

from fuselayers.cli.plan.model import planned_model
from fuselayers.configs import build, compose, model_costs
from fuselayers.partition import explain
from tests.cli.conftest import TINY_MODEL

TINY = [*TINY_MODEL, "model.num_layers=3"]


@pytest.mark.slow  # it traces the whole model
def test_the_numbers_are_those_of_the_whole_model() -> None:
    config = compose("gpt_nano", [*TINY_MODEL, "model.num_layers=2"])
    planned = planned_model(config)
    costs = model_costs(config)
    assert (planned.parameters, planned.blocks) == (costs.parameters, 2)
    assert planned.flops == costs.forward_flops + costs.backward_flops
    model = build(config, ["fusion=off"])
    report = explain(model, *model.example_inputs(1, device="cpu"), backend="inductor", partition="min_cut")
    in_blocks = sum(value.num_bytes for value in report.saved if value.module.startswith("blocks."))
    assert planned.run.saved == pytest.approx(in_blocks, rel=0.05)


@pytest.mark.slow  # it traces the block once for each way
def test_each_way_keeps_less_and_repeats_more() -> None:
    asked = [*TINY, "fusion=off", "train.precision=bfloat16"]
    none, selective, budget, block = (
        planned_model(compose("gpt_nano", [*asked, f"parallel.checkpointing={way}"]))
        for way in ("none", "selective", "budget:0.3", "block")
    )
    assert none.kept == none.run == block.run
    assert block.kept.saved == block.stream == 3 * block.tokens * block.width * 2
    assert block.kept.saved < min(selective.kept.saved, budget.kept.saved)
    assert max(selective.kept.saved, budget.kept.saved) < none.kept.saved
    assert 0 < selective.kept.repeated_flops < block.kept.repeated_flops
    assert budget.kept.repeated_flops > 0


@pytest.mark.slow
def test_encoder_and_decoder_are_counted() -> None:
    pair = planned_model(compose("t5_tiny"))
    assert pair.blocks == 4
    assert pair.run.saved < 4 * pair.run.largest


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (
            ["data.sequence_length=200"],
            r"data\.sequence_length is 200 tokens, but the model's context is 128; lower it",
        ),
        (["model.block=reversible"], r"reversible blocks keep none; set model\.block=transformer"),
    ],
)
def test_a_model_that_cannot_be_counted_is_refused(overrides: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        planned_model(compose("gpt_nano", overrides))


@pytest.mark.slow
def test_a_shorter_sequence_is_counted() -> None:
    planned = planned_model(compose("gpt_nano", ["data.sequence_length=16"]))
    assert planned.tokens == 16
    assert planned.stream == planned.blocks * 16 * planned.width * 4
