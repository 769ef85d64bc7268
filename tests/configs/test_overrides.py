import itertools

import pytest

from fuselayers.configs.overrides import Layer, parse_overrides


def test_choices_and_settings() -> None:
    layer = parse_overrides(["feedforward=mlp", "feedforward.expansion=2", "train.steps=5", "model.block=transformer"])
    assert layer.choices == {"feedforward": "mlp"}
    assert layer.settings == {
        "feedforward": {"expansion": 2},
        "train": {"steps": 5},
        "model": {"block": "transformer"},
    }


def test_the_order_does_not_matter() -> None:
    overrides = ["model.block=other", "model.block.base=500", "model=gpt_nano"]
    layers = [parse_overrides(order) for order in itertools.permutations(overrides)]
    assert layers[0].settings == {"model": {"block": {"name": "other", "base": 500}}}
    assert all(layer == layers[0] for layer in layers)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("feedforwrd=mlp", r"^no config group 'feedforwrd'; did you mean 'feedforward'\?"),
        ("train.steps", r"^cannot read the override 'train.steps': write group=choice or group.option=value"),
        ("+train.steps=5", r"^the override '\+train.steps=5' is refused: every option has its place already"),
        ("~train", r"^the override '~train' is refused: every option has its place already"),
        ("hydra.run.dir=x", r"^the override 'hydra.run.dir=x' is refused: Hydra only composes here"),
        ("train.steps=1,2", r"^the override 'train.steps=1,2' asks for several runs; give one value, or a list"),
        ("train=3", r"^train must be the name of a choice or a mapping of options, got 3$"),
        ("train.steps=" + "1" * 20_000, r"^an override may have 10,000 characters at most, got 20,012"),
    ],
)
def test_errors(override: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_overrides([override])


def test_a_contradiction_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^train.steps is given twice, as 5 and 6; give it once$"):
        parse_overrides(["train.steps=5", "train.steps=6"])
    assert parse_overrides(["train.steps=5", "train.steps=5"]) == Layer(settings={"train": {"steps": 5}})


def test_types() -> None:
    with pytest.raises(
        TypeError, match=r"^overrides must be a list of strings, got the string 'a=b'; write \['a=b'\]$"
    ):
        parse_overrides("a=b")
    with pytest.raises(TypeError, match=r"^an override must be a string such as 'train.steps=100', got 3$"):
        parse_overrides([3])  # type: ignore[list-item]
