from __future__ import annotations

import pytest
import torch

from fuselayers.components import names, registry
from fuselayers.configs import GROUPS, build, choices, compose
from fuselayers.configs.files import chosen_component
from fuselayers.configs.folders import COMPONENT_GROUPS, SHIPPED


def test_a_group_is_a_folder_and_a_choice_a_file() -> None:
    assert {path.name for path in SHIPPED.iterdir() if path.is_dir()} == set(GROUPS)
    for group in GROUPS:
        assert {path.stem for path in (SHIPPED / group).iterdir()} <= set(choices(group))


@pytest.mark.parametrize("group", COMPONENT_GROUPS)
def test_every_component_is_a_choice_and_a_file_of_its_name_means_it(group: str) -> None:
    assert set(names(group)) <= set(choices(group))
    for name in names(group):
        assert chosen_component(group, name, [SHIPPED])["name"] == name


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
