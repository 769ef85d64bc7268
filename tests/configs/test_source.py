from pathlib import Path

import pytest

from fuselayers.configs import compose
from fuselayers.configs.source import plain_sections, read_source


def test_a_name_is_a_model() -> None:
    assert read_source("llama_tiny").choices == {"model": "llama_tiny"}


def test_a_mapping_is_copied() -> None:
    mine = {"defaults": [{"model": "llama_tiny"}, "_self_"], "model": {"hidden_dim": 64}, "train": {"steps": 3}}
    layer = read_source(mine)
    assert layer.choices == {"model": "llama_tiny"}
    assert layer.settings == {"model": {"hidden_dim": 64}, "train": {"steps": 3}}
    layer.settings["train"]["steps"] = 4
    assert mine["train"] == {"steps": 3}
    assert "defaults" in mine


def test_hydras_own_spelling_of_defaults() -> None:
    assert read_source({"defaults": [{"override /feedforward": "mlp"}]}).choices == {"feedforward": "mlp"}


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: llama_tiny\ntrain:\n  steps: 7\n")
    for source in (path, str(path)):
        layer = read_source(source)
        assert (layer.choices, layer.settings) == ({"model": "llama_tiny"}, {"train": {"steps": 7}})


def test_a_config_is_its_own_source() -> None:
    config = compose("llama_tiny", ["train.steps=9"])
    assert compose(config) == config
    assert compose(plain_sections(config)) == config


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"^a config is the name of a shipped model, the path of a .yaml file or a mapp"
    ):
        read_source(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^defaults must be a list of group: choice, got 'gpt_nano'$"):
        read_source({"defaults": "gpt_nano"})
    with pytest.raises(ValueError, match=r"^an entry of defaults must be group: choice, got 'gpt_nano'$"):
        read_source({"defaults": ["gpt_nano"]})
    with pytest.raises(OSError, match=r"cannot read the config file ~nobody-at-all/x.yaml: No such file"):
        read_source("~nobody-at-all/x.yaml")
    with pytest.raises(OSError, match=r"none\.yaml"):
        read_source(tmp_path / "none.yaml")
