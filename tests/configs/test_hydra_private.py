from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from fuselayers.configs.folders import SHIPPED
from fuselayers.configs.hydra_private import compose_files, value_of


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder %20"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "one.yaml").write_text("defaults: [quick]\nseed: 1\nkept: ${a.b}\n")
    (folder / "train" / "two.yaml").write_text("defaults: [one, _self_]\nseed: 2\n")
    (folder / "train" / "three.yaml").write_text("defaults: [_self_, one]\nseed: 2\n")
    return folder


def test_a_file_builds_on_others_of_its_group(tmp_path: Path) -> None:
    folders = [SHIPPED, folder_of(tmp_path)]
    one, two, three = (compose_files(folders, f"train/{name}", {})["train"] for name in ("one", "two", "three"))
    assert one == {**compose_files([SHIPPED], "train/quick", {})["train"], "seed": 1, "kept": "${a.b}"}
    assert two == {**one, "seed": 2}
    assert three == one  # what stands behind _self_ wins, as in Hydra
    assert compose_files(folders, "config", {"train": "two"})["train"] == two


def test_a_model_chooses_what_belongs_to_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [llama_tiny, override /norm: layer_norm, override /residual: sandwich]\n"
        "model: {num_layers: 2}\nnorm: {eps: 0.5}\n"
    )
    sections = compose_files([SHIPPED, tmp_path], "config", {"model": "mine"})
    assert sections["norm"] == {"name": "layer_norm", "eps": 0.5}
    assert sections["residual"] == {"name": "sandwich"}  # a registered component without a file
    assert sections["position"] == {"name": "rotary"}
    assert (sections["model"]["num_layers"], sections["model"]["hidden_dim"]) == (2, 256)


def test_hydras_own_errors_are_a_users(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "circle.yaml").write_text("defaults: [circle]\n")
    with pytest.raises(ValueError, match=r"^train/circle builds on itself, through the defaults of its files$"):
        compose_files([SHIPPED, tmp_path], "train/circle", {})
    (tmp_path / "train" / "twice.yaml").write_text("defaults: [_self_, _self_]\n")
    with pytest.raises(ValueError, match=r"^cannot compose train/twice with its defaults: Duplicate _self_ "):
        compose_files([SHIPPED, tmp_path], "train/twice", {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("007", 7),
        ("-08", -8),
        ("07.5", 7.5),
        ("'007'", "007"),
        ("[007,'007']", [7, "007"]),
        ("{a: 007}", {"a": 7}),
        ("0x10", "0x10"),
        ("12", 12),
        ("1e-3", 1e-3),
        ("off", "off"),
        ("true", True),
        ("null", None),
    ],
)
def test_an_override_reads_numbers_as_a_file_does(text: str, value: object) -> None:
    read = value_of(OverridesParser.create().parse_override(f"a={text}"))
    assert (type(read), read) == (type(value), value)


def test_an_application_of_the_callers_is_left_alone() -> None:
    ConfigStore.instance().store(name="config", node={"stranger": True})
    try:
        with hydra.initialize_config_dir(str(SHIPPED), version_base=None):
            before = GlobalHydra.instance().hydra
            assert "stranger" not in compose_files([SHIPPED], "config", {})
            assert GlobalHydra.instance().hydra is before
    finally:
        del ConfigStore.instance().repo["config.yaml"]
