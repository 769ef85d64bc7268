from pathlib import Path

import pytest

from fuselayers.cli.train.architecture import check_same_architecture, sequence_length
from fuselayers.configs import compose

PATH = Path("run/checkpoint.pt")


def test_the_text_is_cut_to_the_context_or_shorter() -> None:
    assert sequence_length(compose("gpt_nano", ["model.context_length=64"])) == 64
    assert sequence_length(compose("gpt_nano", ["model.context_length=64", "data.sequence_length=16"])) == 16


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["model=bert_base"],
            r"^train needs a model that predicts the next byte, a decoder; model.name is 'encoder'; ta",
        ),
        (["model.vocab_size=255"], r"^model.vocab_size must be at least 256 to hold every byte, got 255$"),
        (
            ["model.context_length=16", "data.sequence_length=17"],
            r"^data.sequence_length must be at most model.context_length, 16, got 17; make one smaller",
        ),
    ],
)
def test_what_cannot_be_trained(overrides: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sequence_length(compose(overrides=overrides))


@pytest.mark.parametrize(
    "change", [["feedforward=mlp"], ["model.dropout=0.3"], ["fusion=off"], ["train.learning_rate=1e-3"]]
)
def test_what_may_change_between_two_sessions(change: list[str]) -> None:
    check_same_architecture(compose("gpt_nano"), compose("gpt_nano", change), path=PATH)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("attention.num_heads=8", "attention.num_heads is 4 there and 8 here"),  # the weights have equal shapes
        ("feedforward.activation=relu", "feedforward.activation is gelu there and relu here"),
        ("position=rotary", "position.name is learned there and rotary here"),
        ("residual=sandwich", "residual.name is pre there and sandwich here"),
        (
            "model.layers=[{at: 1, feedforward: {activation: relu}}]",
            "model.layers.0.feedforward.activation is not set there and relu here",
        ),
    ],
)
def test_what_may_not(change: str, difference: str) -> None:
    with pytest.raises(ValueError, match=r"^the checkpoint run/checkpoint.pt is of another architecture: ") as error:
        check_same_architecture(compose("gpt_nano"), compose("gpt_nano", [change]), path=PATH)
    assert "leave these overrides out" in str(error.value)
    assert difference in str(error.value)
