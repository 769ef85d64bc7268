import re

import pytest

from fuselayers.components.model import Decoder
from fuselayers.configs import build, compose


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("feedforward.expert=gatedmlp", "no feedforward 'gatedmlp'; did you mean 'gated_mlp'?"),
        ("feedforward.expert.epps=1", "no mlp option 'epps'; there are: "),
        ("feedforward.expert.width=small", "feedforward.expert.width must be a whole number or null, got 'small'"),
        ("feedforward.expert=null", "feedforward.expert must be a name or a mapping of options, got None"),
        ("feedforward.expert.activation=gleu", "no activation 'gleu'; did you mean 'gelu'?"),
    ],
)
def test_what_is_refused(override: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        compose("gpt_nano", ["feedforward=mixture_of_experts", override])


MIXTURE = {
    "name": "mixture_of_experts",
    "num_experts": 3,
    "expert": {"name": "gated_mlp", "width": 12, "packed": True},
    "shared_experts": 1,
}


def test_the_experts_of_a_mixture_come_from_a_config() -> None:
    experts = ["feedforward=mixture_of_experts", "feedforward.num_experts=3", "feedforward.shared_experts=1"]
    expert = ["feedforward.expert=gated_mlp", "feedforward.expert.width=12", "feedforward.expert.packed=true"]
    config = compose({"feedforward": MIXTURE}, ["model.num_layers=1", "fusion=off"])
    assert compose(overrides=[*experts, *expert, "model.num_layers=1", "fusion=off"]) == config
    model = build(config)
    assert isinstance(model, Decoder)
    weights = {name: list(value.shape) for name, value in model.blocks[0].feedforward.state_dict().items()}
    width = model.token.weight.shape[1]
    assert weights == {
        "router.weight": [3, width],
        **{
            f"{expert}.{name}": shape
            for expert in ("experts.0", "experts.1", "experts.2", "shared.0")
            for name, shape in (
                ("gate.weight", [12, width]),
                ("up.weight", [12, width]),
                ("down.weight", [width, 12]),
            )
        },
    }
