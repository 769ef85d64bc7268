from __future__ import annotations

from typing import Any

import pytest
import yaml

from fuselayers.configs.yaml_text import dump, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("Yes", "Yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("nullable", "nullable"),
        ("12", 12),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("010", 10),
        ("007", 7),
        ("-08", -8),
        ("07.5", 7.5),
        ("'007'", "007"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("1.5e+3", 1500.0),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("-", "-"),
        ("<<", "<<"),
        ("'12'", "12"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    parsed = parse(f"x: {text}" if text != "-" else "x: '-'")["x"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "off",
            "yes",
            "1e-3",
            "1:30",
            "2024-01-01",
            "12",
            "null",
            "~",
            "",
            " a ",
            "a: b",
            "# a",
            "'",
            '"',
            "- a",
            "[a]",
        ),
        *(
            "é\u2028",
            "a\nb",
            "\t",
            "!!python/name:x",
            "&a",
            "*a",
            "<<",
            "0x10",
            "010",
            ".inf",
            "C:\\x",
            "{a}",
            "%",
            "@",
        ),
        *(True, None, 0, -5, 10**30, 1e-12, 1e22, 0.1, 8 / 3, 1.0, [], ["a", 1], {"b": {"c": []}}),
    ],
)
def test_what_is_dumped_is_read_back_by_any_reader(value: Any) -> None:
    text = dump({"x": value})
    assert parse(text) == yaml.safe_load(text) == {"x": value}
    assert type(parse(text)["x"]) is type(yaml.safe_load(text)["x"]) is type(value)


def test_a_value_that_stands_twice_is_written_twice() -> None:
    shared = [1]
    assert parse(dump({"a": shared, "b": shared})) == {"a": [1], "b": [1]}
