from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from fuselayers.configs.hydra_private import compose_files


def folder_of(tmp_path: Path) -> Path:
    (tmp_path / "part").mkdir()
    (tmp_path / "config.yaml").write_text("defaults:\n  - part: one\n  - _self_\nown: 1\n")
    (tmp_path / "part" / "one.yaml").write_text("size: 1\nkept: ${own}\n")
    (tmp_path / "part" / "two.yaml").write_text("size: 2\n")
    return tmp_path


def test_composes_the_defaults_list_and_a_choice_replaces_its_own(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert compose_files(folder, "config", {}) == {"part": {"size": 1, "kept": "${own}"}, "own": 1}
    assert compose_files(folder, "config", {"part": "two"}) == {"part": {"size": 2}, "own": 1}


def test_an_application_of_the_callers_is_left_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    ConfigStore.instance().store(name="config", node={"stranger": True})
    try:
        with hydra.initialize_config_dir(str(folder), version_base=None):
            before = GlobalHydra.instance().hydra
            assert "stranger" not in compose_files(folder, "config", {})
            assert GlobalHydra.instance().hydra is before
    finally:
        del ConfigStore.instance().repo["config.yaml"]
