from pathlib import Path
from typing import Any

import pytest
import torch

from fuselayers.cli.train.architecture import check_same_architecture, sequence_length
from fuselayers.cli.train.data import Text
from fuselayers.configs import Config, compose

PATH = Path("run/checkpoints/step-000002")


def _text() -> Text:
    return Text(torch.empty(0), torch.empty(0), source="here", num_files=1)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["model=bert_base"],
            r"^train needs a model that predicts the next token, a decoder; model.name is 'encoder'; ta",
        ),
        (
            ["model.vocab_size=255"],
            r"^model.vocab_size must be at least 256 to hold every byte of here, got 255; add model.vocab_size=256$",
        ),
        (
            ["model.context_length=16", "data.sequence_length=17"],
            r"^data.sequence_length must be at most model.context_length, 16, got 17; make one smaller",
        ),
    ],
)
def test_what_cannot_be_trained(overrides: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sequence_length(compose(overrides=overrides), _text())


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
        ("position=rotary", "position is learned there and rotary here"),
        ("residual=sandwich", "residual is pre there and sandwich here"),
        (
            "model.layers=[{at: 1, feedforward: {activation: relu}}]",
            "model.layers.0.feedforward.activation is not set there and relu here",
        ),
    ],
)
def test_what_may_not(change: str, difference: str) -> None:
    with pytest.raises(
        ValueError, match=r"^the checkpoint run/checkpoints/step-000002 is of another architecture: "
    ) as error:
        check_same_architecture(compose("gpt_nano"), compose("gpt_nano", [change]), path=PATH)
    assert "leave these overrides out" in str(error.value)
    assert difference in str(error.value)


def with_layers(*entries: Any) -> Config:
    return compose({"model": {"layers": list(entries)}})


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ({"at": 0, "feedforward": "fused_mlp"}, {"at": 0, "feedforward": "mlp"}),
        ({"at": 0, "feedforward": "fused_mlp"}, {"at": 0, "feedforward": {"name": "mlp"}}),
        ({"at": "0", "feedforward": "fused_mlp"}, {"at": 0, "feedforward": {"activation": "gelu"}}),
        (
            {"at": 0, "feedforward": {"name": "mixture_of_experts", "expert": "fused_mlp"}},
            {"at": 0, "feedforward": {"name": "mixture_of_experts", "expert": {"name": "mlp"}}},
        ),
        (
            {"at": 0, "attention": {"window": 4, "dropout": 0.1}, "residual": {"stochastic_depth": 0.1}},
            {"at": 0, "attention": {"window": 4, "dropout": 0.2}, "residual": {}},
        ),
    ],
)
def test_what_may_change_in_layers_that_differ(saved: Any, now: Any) -> None:
    check_same_architecture(with_layers(saved), with_layers(now), path=PATH)
    check_same_architecture(with_layers(now), with_layers(saved), path=PATH)


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        ({"at": 1, "feedforward": {"name": "mlp"}}, "model.layers.0.at is 0 there and 1 here"),
        ({"at": 0, "feedforward": {"name": "gated_mlp"}}, "model.layers.0.feedforward is mlp there and gated_mlp here"),
        (
            {"at": 0, "feedforward": {"name": "mlp", "expansion": 2.0}},
            "model.layers.0.feedforward.expansion is 4.0 there and 2.0 here",
        ),
        ({"at": 0, "norm": "rms_norm"}, "model.layers.0.norm is not set there and rms_norm here"),
    ],
)
def test_what_may_not_change_in_layers_that_differ(now: Any, difference: str) -> None:
    with pytest.raises(ValueError, match=r"is of another architecture: ") as error:
        check_same_architecture(with_layers({"at": 0, "feedforward": "fused_mlp"}), with_layers(now), path=PATH)
    assert difference in str(error.value)
