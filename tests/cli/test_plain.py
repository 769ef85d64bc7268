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
    config = compose("llama_tiny", ["model.layers=[{at: 0, feedforward: fused_mlp}, {at: 1, norm: layer_norm}]"])
    plain = plain_config(config).model.options["layers"]
    assert (plain[0].feedforward.name, plain[1].norm.name, plain[1].feedforward) == ("mlp", "layer_norm", None)
