from __future__ import annotations

import re
from typing import Any

import pytest

from fuselayers.components import Choice, options, registry
from fuselayers.configs.sections import changed, checked_choice, completed

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


@pytest.mark.parametrize(
    ("kind", "section", "text"),
    [
        ("feedforward", {"name": "mlp", "dropout": 2.0}, "feedforward.dropout must be at least 0 and below 1, got 2.0"),
        ("attention", {"name": "multi_head", "num_heads": 0}, "attention.num_heads must be at least 1, got 0"),
        (
            "attention",
            {"name": "multi_head", "num_heads": 2, "head_dim": -1},
            "attention.head_dim must be at least 1, got -1",
        ),
        ("norm", {"name": "rms_norm", "eps": -1}, "norm.eps must be at least 0, got -1.0"),
        ("position", {"name": "rotary", "fraction": 1.5}, "position.fraction must be above 0 and at most 1, got 1.5"),
    ],
)
def test_an_option_out_of_its_range(kind: str, section: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        checked_choice(kind, completed(kind, section, where=kind), where=kind)


def test_no_name() -> None:
    with pytest.raises(ValueError, match="norm must name a norm, got None; there are: dyt, layer_norm, rms_norm, skip"):
        changed("norm", {}, {}, where="norm")


def test_completed_names_every_option_in_the_components_order() -> None:
    section = {"name": "decoder", "vocab_size": 10, "num_layers": 1, "hidden_dim": 8, "context_length": 4}
    complete = completed("model", section, where="model")
    assert list(complete) == ["name", *(option.name for option in options("model", "decoder"))]
    assert complete["block"] == {"name": "transformer"}
    choice = checked_choice("model", complete, where="model")
    assert choice.options["block"] == Choice("transformer")


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
