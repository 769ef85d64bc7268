import pytest

from fuselayers.cli.plain import plain_config
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


def test_layers_that_differ_are_plain_too() -> None:
    asked = ["model.layers=[{at: 0, norm: rms_norm}, {at: 1, feedforward: {name: fused_mlp, activation: relu}}]"]
    plain = plain_config(compose("gpt_nano", asked))
    first, second = plain.model.options["layers"]
    assert first == compose("gpt_nano", asked).model.options["layers"][0]
    assert (second.feedforward.name, second.feedforward.options["activation"]) == ("mlp", "relu")
    assert plain_config(plain) == plain
