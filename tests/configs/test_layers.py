import re
from pathlib import Path
from typing import Any

import pytest

from fuselayers.components import Choice, LayerChange
from fuselayers.configs import build, compose, rebuild, to_yaml
from fuselayers.configs.sections import with_layer_changes

SMALL = ["model.hidden_dim=32", "fusion=off"]


def layers(text: str, *overrides: str) -> tuple[LayerChange, ...]:
    """The changes that a model is built with."""
    config = compose("gpt_nano", [f"model.layers={text}", *overrides])
    changes = with_layer_changes(config).options["layers"]
    assert isinstance(changes, tuple)
    return changes


def test_a_part_is_changed_as_an_override_would_change_it() -> None:
    (change,) = layers("[{at: '1::2', feedforward: {name: gated_mlp, multiple_of: 8}}]", "feedforward.dropout=0.25")
    assert change == LayerChange("1::2", feedforward=change.feedforward)
    assert isinstance(change.feedforward, Choice)
    # Options set for all layers stay; the other options of the new component are filled in.
    assert {name: change.feedforward.options[name] for name in ("dropout", "multiple_of", "activation")} == {
        "dropout": 0.25,
        "multiple_of": 8,
        "activation": "silu",
    }


def test_the_model_is_built_and_the_file_of_it_builds_it_again(tmp_path: Path) -> None:
    config = compose(
        "gpt_nano", [*SMALL, "model.layers=[{at: '1:', feedforward: gated_mlp}, {at: -1, norm: rms_norm}]"]
    )
    model = build(config)
    assert [type(block.feedforward).__name__ for block in model.blocks] == ["FusedMLP", "GatedMLP", "GatedMLP"]
    assert [type(block.residual.norms[0]).__name__ for block in model.blocks] == ["LayerNorm", "LayerNorm", "RMSNorm"]
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    assert compose(tmp_path / "saved.yaml") == config
    assert compose(config) == config


def test_references_and_ranges_reach_into_layers() -> None:
    (change,) = layers("[{at: 0, feedforward: {dropout: '${model.dropout}'}}]", "model.dropout=0.3")
    assert isinstance(change.feedforward, Choice)
    assert change.feedforward.options["dropout"] == 0.3
    with pytest.raises(
        ValueError, match=r"^model\.layers\[0\]\.feedforward\.dropout must be at least 0 and at most 1, got 2"
    ):
        layers("[{at: 0, feedforward: {dropout: 2}}]")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # One case for each type that YAML may give.
        *(
            (
                f"[{entry}]",
                "model.layers[0] must say at which layers, by an index or a slice (0, 1::2), and what changes: {at: ",
            )
            for entry in ("3", "{at: 0}", *(f"{{at: {at}, norm: rms_norm}}" for at in ("1.5", "true", "null", "[1]")))
        ),
        ("[{at: 0, feedforwrd: mlp}]", "no component in model.layers[0] 'feedforwrd'; did you mean 'feedforward'?"),
        ("[{at: 0, feedforward: mpl}]", "model.layers[0].feedforward: no feedforward 'mpl'; did you mean 'mlp'?"),
        (
            "[{at: 0, feedforward: {expension: 2}}]",
            "model.layers[0].feedforward: no fused_mlp option 'expension'; did you mean 'expansion'?",
        ),
        (
            "[{at: 0, feedforward: {expansion: four}}]",
            "model.layers[0].feedforward.expansion must be a number, got 'four'",
        ),
    ],
)
def test_errors(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        layers(text)


def kinds(model: Any) -> list[str]:
    return [type(block.feedforward).__name__ for block in model.blocks]


def caps(model: Any) -> list[float | None]:
    return [block.attention.soft_cap for block in model.blocks]


def test_an_override_of_a_saved_config_reaches_the_layers_that_differ(tmp_path: Path) -> None:
    asked = [*SMALL, "model.layers=[{at: 0, feedforward: {expansion: 2}}]", "feedforward=fused_mlp"]
    model = build("gpt_nano", asked)
    assert kinds(model) == ["FusedMLP"] * 3
    (tmp_path / "saved.yaml").write_text(to_yaml(compose("gpt_nano", asked)))
    for plain in (rebuild(model, ["feedforward=mlp"]), build(tmp_path / "saved.yaml", ["feedforward=mlp"])):
        assert kinds(plain) == ["MLP"] * 3
        assert [block.feedforward.up.out_features for block in plain.blocks] == [64, 128, 128]  # type: ignore[union-attr]
    gemma = build("gemma2_tiny", ["fusion=off"])
    assert caps(gemma) == [50.0, 50.0]
    assert caps(rebuild(gemma, ["attention.soft_cap=null"])) == [None, None]
    assert caps(build(compose("gemma2_tiny"), ["attention.soft_cap=null", "fusion=off"])) == [None, None]


def test_a_part_that_the_layers_that_differ_know_nothing_of_is_refused_by_its_place() -> None:
    for source in ("gemma2_tiny", compose("gemma2_tiny")):
        with pytest.raises(ValueError, match=r"^model\.layers\[0\]\.attention: no linear option 'window'; there are: "):
            compose(source, ["attention=linear"])


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("3", "layers.at '3' names none of the 3 layers, 0 to 2"),
        ("range(3)", 'layers.at must be an index or a slice such as "0"'),
    ],
)
def test_a_place_that_the_model_does_not_have_is_found_when_it_is_built(at: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        build("gpt_nano", [*SMALL, f"model.layers=[{{at: '{at}', norm: rms_norm}}]"])
