from dataclasses import replace

import pytest

from fuselayers.cli.plan import model as module
from fuselayers.cli.plan.layout import Layout
from fuselayers.cli.plan.model import PlannedModel, planned_model
from fuselayers.configs import build, compose
from tests.cli.plan.conftest import COUNTED


@pytest.fixture(autouse=True)
def _not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "count", lambda _, *, kinds, **__: {kind: replace(COUNTED) for kind in kinds})


@pytest.mark.parametrize(
    ("name", "overrides", "layer"),
    [
        ("gpt2_tiny", ["model.num_layers=3"], "blocks.1."),
        ("gemma2_tiny", [], "blocks.1."),  # its windows differ
        ("t5_tiny", [], "no path"),
    ],
)
def test_parameters_are_those_of_the_model(name: str, overrides: list[str], layer: str) -> None:
    config = compose(name, [*overrides, "fusion=off"])
    sizes = planned_model(config, checkpointing=(), precision="bfloat16").sizes
    built = build(config)
    assert sizes.parameters == sum(one.numel() for one in built.parameters())
    of_layer = [tuple(one.shape) for path, one in built.named_parameters() if path.startswith(layer)]
    assert not of_layer or sorted(sizes.layer) == sorted(of_layer)
    assert sizes.layer_parameters > 0


def test_an_unfused_model_runs_eagerly_and_a_budget_has_its_own_numbers() -> None:
    eager = planned_model(compose("gpt_nano", ["fusion=off"]), checkpointing=["none", "selective"], precision="float32")
    assert eager.run_kind == "eager"
    assert list(eager.counted) == ["eager", "selective"]
    assert eager.precision == "float32"
    fused = planned_model(compose("gpt_nano"), checkpointing=["budget:0.3"], precision="bfloat16")
    assert fused.counted_for(Layout(checkpointing="block")) is fused.counted["min_cut"]
    assert fused.counted_for(Layout(checkpointing="budget:0.3")) is fused.counted["budget:0.3"]
    assert (fused.heads, fused.kv_heads, fused.tokens) == (4, 4, 128)


def test_recomputed_blocks_run_their_forward_again(model: PlannedModel) -> None:
    assert model.block_flops - model.flops("min_cut") == 4 * (4e3 + 1e3)


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.sequence_length is 200 tokens, and the model's context 128; lower it"):
        planned_model(compose("gpt_nano", ["data.sequence_length=200"]), checkpointing=(), precision="bfloat16")
