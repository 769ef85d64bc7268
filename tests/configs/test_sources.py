"""`to_yaml`, and which options a saved config marks."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from fuselayers.configs import Config, build, choices, compose, rebuild, to_yaml
from fuselayers.configs.sources import plain_sections

CASES = [
    # The larger ones of a family have the same sections.
    *(
        pytest.param([f"model={model}"], marks=() if model.endswith(("_tiny", "_nano")) else pytest.mark.slow)
        for model in choices("model")
    ),
    ["model=llama_tiny", "feedforward=mlp", "norm=layer_norm", "fusion=off"],
    ["train=quick", "train.output='a: b # c'", "train.learning_rate=1e-3", "data.path='off'", "data.suffixes=[]"],
    ["train.output='1e-3'", "train.resume='2024-01-01'", "data.path='ä\u2028\\'\"'", "position=none"],
    ["feedforward.activation=null", "attention.head_dim=16", "model.tie_embeddings=false"],
]
TEXTS = ["yes", "1:30", "12", "null", "~", " a ", "- a", "[a]", "a\nb", "\t", "!!python/name:x", "&a", "*a", "<<"]
TEXTS += ["0x10", "010", ".inf", "1_000", "5.", "C:\\x", "{a}", "%", "@", "=", "a " * 80]


@pytest.mark.parametrize("overrides", CASES, ids=lambda overrides: " ".join(overrides)[:50])
def test_a_config_comes_back_from_its_text(overrides: list[str], tmp_path: Path) -> None:
    config = compose(overrides=overrides)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    again = compose(path)
    assert again == config
    assert to_yaml(again) == to_yaml(config)
    read = yaml.safe_load(to_yaml(config))
    assert compose(read) == compose(OmegaConf.create(read)) == compose(plain_sections(config)) == config


def test_a_text_comes_back_as_the_same_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in TEXTS:
        path.write_text(to_yaml(compose({"train": {"output": text}})), encoding="utf-8")
        assert compose(path).train.output == text


def test_every_option_is_written_out_and_those_that_nobody_wrote_are_marked() -> None:
    written = yaml.safe_load(to_yaml(compose("bert_base", ["feedforward=mlp", "feedforward.bias=true"])))
    sections = ["model", "feedforward", "attention", "norm", "residual", "position"]
    assert list(written) == [*sections, "fusion", "train", "data", "parallel", "left_at_default"]
    assert written["feedforward"] == {
        "name": "mlp",
        "expansion": 4.0,
        "width": None,
        "activation": "gelu",
        "bias": True,
        "dropout": 0.0,
    }
    assert written["model"]["block"] == {"name": "transformer"}
    assert written["residual"] == {"name": "post", "layer_scale": None, "stochastic_depth": 0.0}
    marked = [path for path in written["left_at_default"] if path.startswith("feedforward")]
    assert marked == [f"feedforward.{name}" for name in ("activation", "dropout", "expansion", "width")]


def sources(config: Config, tmp_path: Path) -> list[Config | Path]:
    path = tmp_path / "saved.yaml"
    path.write_text(to_yaml(config))
    return [config, path]


def test_a_swap_in_a_saved_config_keeps_what_was_written(tmp_path: Path) -> None:
    config = compose({"feedforward": {"name": "mlp", "bias": True, "expansion": 4.0}})
    fresh = compose({"feedforward": {"name": "mlp"}})
    for saved, new in zip(sources(config, tmp_path), sources(fresh, tmp_path / ".."), strict=True):
        kept = compose(saved, ["feedforward=gated_mlp"]).feedforward.options
        assert (kept["bias"], kept["expansion"], kept["activation"]) == (True, 4.0, "silu")
        default = compose(new, ["feedforward=gated_mlp"]).feedforward.options
        assert (default["bias"], default["expansion"], default["activation"]) == (False, 8 / 3, "silu")
    model = rebuild(build(config, ["fusion=off", "model.num_layers=1"]), ["attention.num_heads=2"])
    assert model.built_from.feedforward == config.feedforward  # type: ignore[union-attr]


def test_there_and_back_again(tmp_path: Path) -> None:
    config = compose("gpt_nano", ["feedforward=mlp", "model.embedding.scale=true"])
    for saved in sources(config, tmp_path):
        there = compose(saved, ["feedforward=gated_mlp", "norm=rms_norm"])
        assert compose(there, ["feedforward=mlp", "norm=layer_norm"]) == config


def test_an_option_that_was_edited_counts_as_written(tmp_path: Path) -> None:
    path = tmp_path / "saved.yaml"
    path.write_text(to_yaml(compose({"feedforward": "mlp"})).replace("expansion: 4.0", "expansion: 3.0"))
    assert "feedforward.expansion" in compose({"feedforward": "mlp"}).left_at_default
    assert compose(path, ["feedforward=gated_mlp"]).feedforward.options["expansion"] == 3.0


def test_a_mark_of_another_form() -> None:
    with pytest.raises(ValueError, match=r"^left_at_default must be a list of options such as feedforward.bias, got"):
        compose({"left_at_default": 3})


@pytest.mark.parametrize(
    ("content", "path", "text"),
    [
        (
            {"feedforward": {"name": "mlp"}},
            "feedforward.biass",
            "no feedforward option 'biass'; did you mean 'bias'? there are: activation, bias, dropout, expansion",
        ),
        (
            {"feedforward": "mlp"},
            "feedforward.multiple_of",
            "no feedforward option 'multiple_of'; there are: activation",
        ),
        ({}, "norm.epps", "no norm option 'epps'; did you mean 'eps'? there are: "),
        (
            {"feedforward": {"name": "mixture_of_experts", "expert": "gated_mlp"}},
            "feedforward.expert.multiple",
            "no feedforward option 'expert.multiple'; did you mean 'expert.multiple_of'? there are: ",
        ),
        ({}, "feedforwards.bias", "no component 'feedforwards'; did you mean 'feedforward'? there are: attention, "),
        ({}, "train.steps", "no component 'train'; there are: attention, "),
    ],
)
def test_a_mark_that_is_no_option(content: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(f"left_at_default has {path!r}: {text}")):
        compose({**content, "left_at_default": [path]})


def test_every_mark_of_a_component_within_a_component_is_an_option() -> None:
    config = compose("gpt_nano", ["feedforward=mixture_of_experts", "feedforward.expert=gated_mlp"])
    assert "feedforward.expert.multiple_of" in config.left_at_default
    saved = yaml.safe_load(to_yaml(config))
    assert compose(saved) == config
    # The marks belong to the components of the file, not to those that replace them.
    assert compose(saved, ["feedforward=mlp"]).feedforward.name == "mlp"
    assert compose(saved, ["model=vit_tiny"]) == compose("vit_tiny")


def test_a_config_with_another_component_needs_no_other_marks() -> None:
    config = compose("gpt_nano", ["feedforward=gated_mlp"])
    mlp = compose("gpt_nano", ["feedforward=mlp"]).feedforward
    assert compose(replace(config, feedforward=mlp)).feedforward == mlp


def test_a_component_within_a_component_may_be_named_by_the_default() -> None:
    content = {"feedforward": {"name": "mixture_of_experts", "expert": {"bias": True}}}
    config = compose({**content, "left_at_default": ["feedforward.expert.width"]})
    assert config.feedforward == compose(content).feedforward
