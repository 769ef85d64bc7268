from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Optional, Union

import pytest
from omegaconf import OmegaConf

from fuselayers.components import Choice
from fuselayers.configs.values import checked, plain_copy, read_yaml

HUGE = 10**400


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
        ("${model.position.base}", "${model.position.base}"),
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
def test_every_interpolation_but_a_reference_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        plain_copy({"train": {"output": text}})
    refused, _, advice = str(caught.value).partition("; ")
    assert refused == (
        f"train.output={text!r} is refused: ${{...}} may only stand alone and name another value, as ${{model.dropout}}"
    )
    assert advice == (
        "resolvers such as ${oc.env:...} are not run. In an application of your own, call OmegaConf.resolve(cfg) first"
    )


@pytest.mark.parametrize(
    ("value", "annotation", "fitted"),
    [
        (3, float, 3.0),
        (None, int | None, None),
        (3, Optional[float], 3.0),  # noqa: UP045 (a user may write it)
        (3, Union[str, float], 3.0),  # noqa: UP007
        ("a", Literal["a", "b"], "a"),
        ([1, 2], tuple[int, int], [1, 2]),
        ("f", Callable[[], int], "f"),
        ("anything", Any, "anything"),
    ],
)
def test_values_that_fit(value: Any, annotation: Any, fitted: Any) -> None:
    result = checked("x.y", value, annotation)
    assert result == fitted
    assert type(result) is type(fitted)


@pytest.mark.parametrize(
    ("value", "annotation", "text"),
    [
        (3.0, int, "x.y must be a whole number, got 3.0"),
        (float("inf"), float | None, "x.y must be a number or null, got inf"),
        (HUGE, float, "x.y must be a number, got 1" + 79 * "0" + "..."),
        (5, str, "x.y must be text, got 5; quote it to make it text, with two pairs of quotes on a command line"),
        ("c", Literal["a", "b"], "no x.y 'c'; there are: a, b"),
        (1, Literal["a", "b"], "x.y must be one of a, b, got 1"),
        (True, Literal[1, 2], "x.y must be one of 1, 2, got True"),
        ("a", tuple[str, ...], "x.y must be a list, got 'a'; write [a]"),
        (["a", 1], tuple[str, ...], "x.y[1] must be text, got 1; quote it"),
        ({"a": 1}, str | None, "x.y must be text or null, got {'a': 1}"),
    ],
)
def test_values_that_do_not_fit(value: Any, annotation: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        checked("x.y", value, annotation)
    assert text in str(caught.value)


@pytest.mark.parametrize("letter", ["x", "é", "語", "🙂"])
def test_a_file_is_as_large_as_its_bytes(letter: str, tmp_path: Path) -> None:
    # The end counts: a file that was cut off must not be taken for a whole one.
    end = "\nsteps: 5\n"
    room = 100_000 - len(f"# {end}")
    filled = letter * (room // len(letter.encode())) + "x" * (room % len(letter.encode()))
    path = tmp_path / "large.yaml"
    path.write_text(f"# {filled}{end}", encoding="utf-8")
    assert path.stat().st_size == 100_000
    assert read_yaml(path) == {"steps": 5}
    for more in ("x", letter):
        path.write_text(f"# {more}{filled}{end}", encoding="utf-8")
        with pytest.raises(ValueError, match=r"large\.yaml: a config file may have 100,000 bytes at most; no config"):
            read_yaml(path)
