from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fuselayers.configs import choices, compose, to_yaml

CASES = [
    *([f"model={model}"] for model in choices("model")),
    ["model=llama_tiny", "feedforward=mlp", "norm=layer_norm", "fusion=off"],
    ["train=quick", "train.output='a: b # c'", "train.learning_rate=1e-3", "data.path='off'", "data.suffixes=[]"],
    ["train.output='1e-3'", "train.resume='2024-01-01'", "data.path='ä\u2028\\'\"'", "position=none"],
    ["feedforward.activation=null", "attention.head_dim=16", "model.tie_embeddings=false"],
]


@pytest.mark.parametrize("overrides", CASES, ids=[" ".join(case)[:50] for case in CASES])
def test_a_config_comes_back_from_its_text(overrides: list[str], tmp_path: Path) -> None:
    config = compose(overrides=overrides)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    again = compose(path)
    assert again == config
    assert to_yaml(again) == to_yaml(config)
    assert compose(yaml.safe_load(to_yaml(config))) == config


def test_every_option_is_written_out() -> None:
    written = yaml.safe_load(to_yaml(compose("bert_base", ["feedforward=mlp"])))
    assert list(written) == [
        "model",
        "feedforward",
        "attention",
        "norm",
        "residual",
        "position",
        "fusion",
        "train",
        "data",
    ]
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
