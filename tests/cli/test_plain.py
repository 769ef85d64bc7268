from dataclasses import replace
from typing import Any

import pytest

from fuselayers.cli.plain import plain_config
from fuselayers.components import Choice, FusedMLP, LayerChange
from fuselayers.configs import Config, build, compose


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


def with_layers(option: str, entries: Any) -> Config:
    config = compose("gpt_nano", ["feedforward=mlp", "fusion=off"])
    return replace(config, model=Choice(config.model.name, {**config.model.options, option: entries}))


@pytest.mark.parametrize("option", ["layers", "decoder_layers"])
@pytest.mark.parametrize(
    ("fused", "plain"),
    [
        (LayerChange("0", feedforward="fused_mlp"), LayerChange("0", feedforward="mlp")),
        ({"at": 0, "feedforward": "fused_mlp"}, {"at": 0, "feedforward": "mlp"}),
        (
            {"at": "1::2", "feedforward": {"name": "fused_mlp", "activation": "relu"}},
            {"at": "1::2", "feedforward": {"name": "mlp", "activation": "relu"}},
        ),
        (
            {"at": ":", "feedforward": {"name": "mixture_of_experts", "expert": "fused_mlp"}},
            {"at": ":", "feedforward": {"name": "mixture_of_experts", "expert": "mlp"}},
        ),
        (
            {"at": -1, "feedforward": {"expert": {"name": "fused_mlp", "expansion": 2.0}}},
            {"at": -1, "feedforward": {"expert": {"name": "mlp", "expansion": 2.0}}},
        ),
        (
            {"at": 0, "block": Choice("mine", {"inner": ["fused_mlp", None]})},
            {"at": 0, "block": Choice("mine", {"inner": ["mlp", None]})},
        ),
    ],
)
def test_layers_that_differ_are_plain_too(option: str, fused: Any, plain: Any) -> None:
    other = {"at": 1, "norm": {"name": "rms_norm", "eps": 1e-3}}
    for container in (tuple, list):
        expected = with_layers(option, container((plain, other)))
        assert plain_config(with_layers(option, container((fused, other)))) == expected
        assert plain_config(expected) == expected


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
