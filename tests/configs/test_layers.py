"""`model.layers` in a config; what is refused stands in test_compose_hostile.py."""

from __future__ import annotations

import pytest

from fuselayers.components import Choice, LayerChange
from fuselayers.configs import build, compose
from fuselayers.configs.layers import checked_layers, completed_layers

SECTIONS = {
    "model": {"name": "decoder", "block": {"name": "transformer"}},
    "feedforward": {"name": "mlp", "expansion": 2.0, "activation": "relu", "bias": True, "dropout": 0.25},
    "norm": {"name": "layer_norm", "eps": 1e-5, "bias": True},
}


def test_a_change_is_an_override_of_the_other_layers_part() -> None:
    entries = [
        {"at": 0, "feedforward": {"expansion": 3}},
        {"at": "1::2", "feedforward": "gated_mlp", "norm": "rms_norm"},
    ]
    first, second = completed_layers(entries, SECTIONS)
    assert first == {"at": "0", "feedforward": {**SECTIONS["feedforward"], "expansion": 3}}
    # dropout, activation and expansion were set; bias stood at mlp's default, and gated_mlp has its own
    assert second["feedforward"] == {
        "name": "gated_mlp",
        "expansion": 2.0,
        "multiple_of": 1,
        "activation": "relu",
        "bias": False,
        "dropout": 0.25,
    }
    assert second["norm"] == {"name": "rms_norm", "eps": 1e-6}
    assert checked_layers([first])[0] == LayerChange(
        "0", feedforward=Choice("mlp", {"expansion": 3.0, "activation": "relu", "bias": True, "dropout": 0.25})
    )
    assert entries[0] == {"at": 0, "feedforward": {"expansion": 3}}


def test_a_block_changes_the_models_own() -> None:
    completed = completed_layers([{"at": ":", "block": {}}], SECTIONS)
    assert completed == [{"at": ":", "block": {"name": "transformer"}}]


def test_layers_are_built_as_the_config_says() -> None:
    asked = ["model.layers=[{at: '1::2', norm: rms_norm, residual: post}, {at: -1, feedforward: mlp}]"]
    model = build("gpt_nano", [*asked, "fusion=off", "model.hidden_dim=8", "model.num_layers=4"])
    kinds = [
        (type(block.residual).__name__, type(block.residual.norm(0)).__name__, type(block.feedforward).__name__)
        for block in model.blocks  # type: ignore[union-attr]
    ]
    plain, other = ("PreResidual", "LayerNorm", "FusedMLP"), ("PostResidual", "RMSNorm", "FusedMLP")
    assert kinds == [plain, other, plain, (*other[:2], "MLP")]


def test_an_option_of_a_change_is_checked_with_its_path() -> None:
    with pytest.raises(
        ValueError, match=r"^model.layers\[0\].feedforward.dropout must be at least 0 and below 1, got 2.0$"
    ):
        compose(overrides=["model.layers=[{at: 0, feedforward: {dropout: 2}}]"])


def test_a_change_follows_a_reference() -> None:
    asked = ["model.layers=[{at: 0, feedforward: {dropout: '${model.dropout}'}}]", "model.dropout=0.25"]
    (change,) = compose(overrides=asked).model.options["layers"]
    assert change.feedforward.options["dropout"] == 0.25
