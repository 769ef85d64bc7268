from __future__ import annotations

from typing import Any

import pytest

from fuselayers.components import Choice, registry
from fuselayers.configs.sections import changed, completed

MODEL = {"name": "decoder", "block": "transformer", "hidden_dim": 8}


class Other:
    def __init__(self, hidden_dim: int, *, base: float = 1.0) -> None: ...


@pytest.fixture(autouse=True)
def other_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._OWNERS["block"], "other", Other)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block": "other"}, {"name": "other"}),
        ({"block": {"name": "other", "base": 5}}, {"name": "other", "base": 5}),
        ({"block": Choice("other", {"base": 5})}, {"name": "other", "base": 5}),
    ],
)
def test_a_component_within_a_component(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    before = {**MODEL}
    assert changed("model", before, changes, where="model") == {**MODEL, "block": expected}
    assert before == MODEL


def test_options_of_a_component_within_are_kept_until_it_is_swapped() -> None:
    section = changed("model", MODEL, {"block": {"name": "other", "base": 5}}, where="model")
    assert changed("model", section, {"hidden_dim": 16}, where="model")["block"] == {"name": "other", "base": 5}
    assert changed("model", section, {"block": "other"}, where="model")["block"] == {"name": "other", "base": 5}
    assert changed("model", section, {"block": "transformer"}, where="model")["block"] == {"name": "transformer"}


def test_a_swapped_model_keeps_its_sizes_and_says_what_else_changes() -> None:
    section = {"name": "decoder", "vocab_size": 10, "block": {"name": "other", "base": 5}, "logit_soft_cap": 5.0}
    notes: list[str] = []
    assert changed("model", section, {"name": "encoder", "block": "transformer"}, where="model", notes=notes) == {
        "name": "encoder",
        "vocab_size": 10,
        "block": {"name": "transformer"},
    }
    assert notes == [
        "model=encoder replaces decoder: by default init='bert' (was 'gpt2'); "
        "dropped logit_soft_cap=5.0, which encoder does not have",
        "model.block=transformer replaces other: dropped base=5, which transformer does not have",
    ]


def test_a_component_that_must_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict:
        def __init__(self, *, block: Choice | str) -> None: ...

    monkeypatch.setitem(registry._OWNERS["model"], "strict", Strict)
    monkeypatch.setitem(Strict.__init__.__globals__, "Choice", Choice)
    with pytest.raises(ValueError, match="model 'strict' needs the option 'block'"):
        completed("model", {"name": "strict"}, where="model")
    with pytest.raises(
        ValueError, match=r"model.block must name a block, got None; there are: other, reversible, transformer"
    ):
        changed("model", {"name": "strict"}, {"block": {"base": 1.0}}, where="model")
