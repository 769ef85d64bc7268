from dataclasses import replace

import pytest

from fuselayers.cli.plain import plain_config
from fuselayers.components import Choice
from fuselayers.configs import build, compose


@pytest.mark.parametrize("model", ["gpt_nano", "llama_tiny"])
def test_only_the_way_of_computing_changes(model: str) -> None:
    config = compose(model, ["fusion.scope=layer"])
    plain = plain_config(config)
    assert plain.fusion.scope == "none"
    assert plain.feedforward.name == {"gpt_nano": "mlp", "llama_tiny": "gated_mlp"}[model]
    assert plain.feedforward.options == config.feedforward.options
    assert (plain.model, plain.attention, plain.norm) == (config.model, config.attention, config.norm)
    assert build(plain).state_dict().keys() == build(config).state_dict().keys()
    assert plain_config(plain) == plain


def test_experts_and_the_layers_of_a_second_stack_are_plain_too() -> None:
    asked = ["model.layers=[{at: 0, feedforward: fused_mlp}]", "feedforward=mixture_of_experts",
             "feedforward.expert=fused_mlp"]  # fmt: skip
    config = compose("gpt_nano", asked)
    # As an encoder-decoder has it.
    options = {**config.model.options, "decoder_layers": config.model.options["layers"]}
    plain = plain_config(replace(config, model=Choice("encoder_decoder", options)))
    for option in ("layers", "decoder_layers"):
        assert plain.model.options[option][0].feedforward.name == "mlp"
    expert = plain.feedforward.options["expert"]
    assert expert == Choice("mlp", config.feedforward.options["expert"].options)


def test_layers_that_differ_are_plain_too() -> None:
    asked = ["model.layers=[{at: 0, norm: rms_norm}, {at: 1, feedforward: {name: fused_mlp, activation: relu}}]"]
    plain = plain_config(compose("gpt_nano", asked))
    first, second = plain.model.options["layers"]
    assert first == compose("gpt_nano", asked).model.options["layers"][0]
    assert (second.feedforward.name, second.feedforward.options["activation"]) == ("mlp", "relu")
    assert plain_config(plain) == plain
