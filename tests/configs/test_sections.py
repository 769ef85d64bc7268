from __future__ import annotations

from typing import Any

import pytest

from fuselayers.components import Choice, options, registry
from fuselayers.configs.sections import changed, checked_choice, completed

MODEL = {"name": "decoder", "position": "learned", "hidden_dim": 8}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"position": "rotary"}, {"name": "rotary"}),
        ({"position": {"name": "rotary", "base": 5}}, {"name": "rotary", "base": 5}),
        ({"position": {"name": "none"}}, {"name": "none"}),
    ],
)
def test_a_component_within_a_component(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    before = {**MODEL}
    assert changed("model", before, changes, where="model") == {**MODEL, "position": expected}
    assert before == MODEL


def test_options_of_a_component_within_are_kept_until_it_is_swapped() -> None:
    section = changed("model", MODEL, {"position": {"name": "rotary", "base": 5}}, where="model")
    assert changed("model", section, {"hidden_dim": 16}, where="model")["position"] == {"name": "rotary", "base": 5}
    assert changed("model", section, {"position": "rotary"}, where="model")["position"] == {"name": "rotary", "base": 5}
    assert changed("model", section, {"position": "none"}, where="model")["position"] == {"name": "none"}


def test_a_swapped_model_keeps_its_sizes() -> None:
    section = {
        "name": "decoder",
        "vocab_size": 10,
        "hidden_dim": 8,
        "position": {"name": "rotary"},
        "block": "pre_norm",
    }
    # pre_norm is the decoder's default and so was not set; rotary is not
    assert changed("model", section, {"name": "encoder"}, where="model") == {
        "name": "encoder",
        "vocab_size": 10,
        "hidden_dim": 8,
        "position": {"name": "rotary"},
    }


def test_no_name() -> None:
    with pytest.raises(ValueError, match="norm must name a norm, got None; there are: layer_norm, rms_norm"):
        changed("norm", {}, {}, where="norm")


def test_completed_names_every_option_in_the_components_order() -> None:
    section = {"name": "decoder", "vocab_size": 10, "num_layers": 1, "hidden_dim": 8, "context_length": 4}
    complete = completed("model", section, where="model")
    assert list(complete) == ["name", *(option.name for option in options("model", "decoder"))]
    assert complete["position"] == {"name": "learned"}
    choice = checked_choice("model", complete, where="model")
    assert choice.options["block"] == Choice("pre_norm")


def test_a_component_that_must_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict:
        def __init__(self, *, position: Choice | str) -> None: ...

    monkeypatch.setitem(registry._OWNERS["model"], "strict", Strict)
    monkeypatch.setitem(Strict.__init__.__globals__, "Choice", Choice)
    with pytest.raises(ValueError, match="model 'strict' needs the option 'position'"):
        completed("model", {"name": "strict"}, where="model")
    with pytest.raises(ValueError, match=r"model.position must name a position, got None; there are: learned, none"):
        changed("model", {"name": "strict"}, {"position": {"base": 1.0}}, where="model")
