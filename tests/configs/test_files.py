from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fuselayers.configs
from fuselayers.components import names, registry
from fuselayers.configs import GROUPS, build, choices, compose
from fuselayers.configs.files import COMPONENT_GROUPS, chosen_component
from fuselayers.configs.hydra_private import compose_files

FOLDER = Path(fuselayers.configs.__file__).parent / "groups"


def test_a_group_is_a_folder_and_a_choice_a_file() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(GROUPS)
    for group in GROUPS:
        assert {path.stem for path in (FOLDER / group).iterdir()} <= set(choices(group))


@pytest.mark.parametrize("group", COMPONENT_GROUPS)
def test_every_shipped_component_has_a_file_of_its_name(group: str) -> None:
    for name in names(group):
        assert (FOLDER / group / f"{name}.yaml").is_file()
        assert chosen_component(group, name)["name"] == name


def test_a_component_that_a_user_registers_is_a_choice_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, hidden_dim: int, *, times: float = 2.0, dropout: float = 0.0) -> None:
            super().__init__()
            self.times = times
            self.dropout = dropout

    monkeypatch.setitem(registry._OWNERS["feedforward"], "doubled", Doubled)
    assert "doubled" in choices("feedforward")
    config = compose(overrides=["feedforward=doubled", "feedforward.times=3"])
    assert config.feedforward.options == {"times": 3.0, "dropout": config.model.options["dropout"]}
    layer = build(config, ["fusion=off", "model.num_layers=1"]).blocks[0].feedforward  # type: ignore[index, union-attr]
    assert (type(layer), layer.times) == (Doubled, 3.0)


def test_an_unknown_group_has_no_choices() -> None:
    with pytest.raises(
        ValueError, match="no config group 'models'; did you mean 'model'\\? there are: attention, data"
    ):
        choices("models")


def test_files_may_lie_in_a_folder_with_a_space_and_set_options_of_a_choice(tmp_path: Path) -> None:
    folder = tmp_path / "a folder %20"
    (folder / "norm").mkdir(parents=True)
    (folder / "norm" / "loose.yaml").write_text("name: rms_norm\neps: 0.1\n")
    (folder / "main.yaml").write_text("defaults: [{norm: loose}, _self_]\ntrain: {seed: '${a.b}'}\n")
    expected = {"norm": {"name": "rms_norm", "eps": 0.1}, "train": {"seed": "${a.b}"}}
    assert compose_files(folder, "main", {}) == expected
