from __future__ import annotations

import enum
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest
from omegaconf import OmegaConf

from fuselayers.components import Choice
from fuselayers.configs.values import plain_copy


class Text(str):
    pass


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (OrderedDict(a=(1, 2.5)), {"a": [1, 2.5]}),
        (MappingProxyType({"a": None}), {"a": None}),
        (OmegaConf.create({"a": {"b": [1, "${a.c}"], "c": True}}), {"a": {"b": [1, "${a.c}"], "c": True}}),
        ({"a": OmegaConf.create([1])}, {"a": [1]}),
        (Choice("rotary", {"base": 5.0}), {"name": "rotary", "base": 5.0}),
        ({Text("a"): Text("b")}, {"a": "b"}),
        (Colour.RED, 1),
        (True, True),
    ],
)
def test_copies_are_of_builtin_types(value: Any, plain: Any) -> None:
    copied = plain_copy(value)
    assert copied == plain
    assert types_of(copied) == types_of(plain)


def types_of(value: Any) -> Any:
    if type(value) is dict:
        return {type(key): types_of(entry) for key, entry in value.items()}
    return [types_of(entry) for entry in value] if type(value) is list else type(value)


def test_a_copy_shares_nothing() -> None:
    value: dict[str, Any] = {"a": {"b": [1]}}
    copied = plain_copy(value)
    copied["a"]["b"].append(2)
    assert value == {"a": {"b": [1]}}


@pytest.mark.parametrize("text", ["${model.dropout}", "${model.position.base}", "$HOME", "{x}", "$", "100 %"])
def test_text_that_runs_nothing_is_left_as_it_is(text: str) -> None:
    assert plain_copy(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HOME}",
        "${oc.env:HOME,x}",
        "${model}",
        "${}",
        "${.dropout}",
        "${..model.dropout}",
        "${model.dropout} ",
        "${model.dropout}\n",
        "a${model.dropout}",
        "${model[dropout]}",
        "${${model.dropout}}",
        "${model.${model.dropout}}",
        "\\${oc.env:HOME}",
        "${_a.b}",
        "${",
    ],
)
def test_every_other_interpolation_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        plain_copy({"train": {"output": text}})
    assert str(caught.value) == (
        f"train.output={text!r} is refused: ${{...}} may only stand alone and name another value, "
        "as ${model.dropout}; resolvers such as ${oc.env:...} are not run"
    )


def test_hydra_is_refused_as_a_group_and_is_a_name_like_any_other_below() -> None:
    with pytest.raises(ValueError, match="'hydra' is refused: Hydra only composes here"):
        plain_copy({"hydra": {}})
    assert plain_copy({"data": {"hydra": 1}}) == {"data": {"hydra": 1}}
