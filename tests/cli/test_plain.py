import pytest

from fuselayers.cli.plain import plain_config
from fuselayers.components import FusedMLP
from fuselayers.configs import build, compose


@pytest.mark.parametrize("model", ["gpt_nano", "llama_tiny"])
def test_only_the_way_of_computing_changes(model: str) -> None:
    config = compose(model, ["fusion.scope=block"])
    plain = plain_config(config)
    assert plain.fusion.scope == "none"
    assert plain.feedforward.name == {"gpt_nano": "mlp", "llama_tiny": "gated_mlp"}[model]
    assert plain.feedforward.options == config.feedforward.options
    assert (plain.model, plain.attention, plain.norm) == (config.model, config.attention, config.norm)
    assert build(plain).state_dict().keys() == build(config).state_dict().keys()
    assert plain_config(plain) == plain


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("t5_tiny", ["model.decoder_layers=[{at: 0, feedforward: fused_mlp}]", "feedforward=mlp"]),
        (
            "gpt_nano",
            [
                "feedforward=mixture_of_experts",
                "feedforward.num_experts=2",
                "feedforward.expert=fused_mlp",
                "model.layers=[{at: 0, feedforward: fused_mlp}, {at: 1, feedforward: {expert: {expansion: 2}}}]",
            ],
        ),
    ],
)
def test_what_is_built_has_no_fused_layer(model: str, asked: list[str]) -> None:
    config = compose(model, asked)
    fused, plain = (build(made) for made in (config, plain_config(config)))
    assert any(type(module) is FusedMLP for module in fused.modules())
    assert not any(type(module) is FusedMLP for module in plain.modules())
    assert plain.state_dict().keys() == fused.state_dict().keys()
