from __future__ import annotations

import pytest
import torch

from fuselayers.components import registry
from fuselayers.components.ranges import Probability
from fuselayers.configs.tables import OptionRow, option_rows


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_option_of_every_component_has_a_row_and_a_meaning(kind: str) -> None:
    rows = option_rows(kind)
    expected = [
        (name, option)
        for name in registry.names(kind)
        for option in [option.name for option in registry.options(kind, name)] or [""]
    ]
    assert [(row.name, row.option) for row in rows] == expected
    assert all(len(row.meaning.split()) >= 2 for row in rows)


def test_a_row_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(torch.nn.Module):
        """Mine.

        Args:
            share: what is dropped | or not.
        """

        def __init__(self, hidden_dim: int, *, share: Probability | None = None) -> None:
            super().__init__()

    monkeypatch.setitem(registry._OWNERS["embedding"], "mine", Mine)
    monkeypatch.setitem(Mine.__init__.__globals__, "Probability", Probability)
    row = OptionRow("mine", "share", "float | None", "at least 0 and at most 1", "None", "what is dropped | or not.")
    assert [row] == [row for row in option_rows("embedding") if row.name == "mine"]


def test_a_section_has_the_numbers_of_the_shipped_files() -> None:
    rows = {row.option: row for row in option_rows("train")}
    assert rows["steps"] == OptionRow("train", "steps", "int", "at least 1", "2400", "updates of the weights (steps)")
    assert rows["output"].default == "''"
    assert {row.option for row in option_rows("data")} == {"path", "sequence_length", "held_out", "suffixes"}


def test_no_such_table() -> None:
    with pytest.raises(ValueError, match=r"^no kind 'normm'; did you mean 'norm'\? there are: activation, .* train$"):
        option_rows("normm")
