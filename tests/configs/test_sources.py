"""A config that `to_yaml` saved is read as the same config."""

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from fuselayers.configs import choices, compose, to_yaml

# A model for each kind of model, block and list entry; the others differ from these in numbers and names.
DAILY = {"gpt_nano", "gemma2_tiny", "mixtral_tiny", "t5_tiny", "vit_tiny"}
CASES = [
    *(pytest.param([f"model={model}"], marks=() if model in DAILY else pytest.mark.slow) for model in choices("model")),
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
    assert compose(read) == compose(OmegaConf.create(read)) == config


def test_a_text_comes_back_as_the_same_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in TEXTS:
        path.write_text(to_yaml(compose({"train": {"output": text}})), encoding="utf-8")
        assert compose(path).train.output == text


def test_every_option_is_written_out() -> None:
    written = yaml.safe_load(to_yaml(compose("bert_base", ["feedforward=mlp"])))
    sections = ["model", "feedforward", "attention", "norm", "residual", "position"]
    assert list(written) == [*sections, "fusion", "train", "data", "parallel"]
    assert written["norm"] == {"name": "layer_norm", "eps": 1e-12, "bias": True}
    assert written["model"]["block"] == {"name": "transformer"}


@pytest.mark.parametrize(
    "swap", ["feedforward=gated_mlp", "norm=rms_norm", "attention=linear", "model.block=reversible"]
)
def test_a_swap_means_the_same_in_a_saved_config(swap: str, tmp_path: Path) -> None:
    asked = ["feedforward.expansion=3", "feedforward.bias=false", "norm.eps=1e-4"]
    expected = compose("gpt_nano", [*asked, swap])
    saved, path = compose("gpt_nano", asked), tmp_path / "saved.yaml"
    path.write_text(to_yaml(saved))
    assert compose(saved, [swap]) == compose(path, [swap]) == expected
