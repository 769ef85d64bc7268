from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fuselayers.configs.yaml_text import dump, parse, read


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


@pytest.mark.parametrize("letter", ["x", "é", "語", "🙂"])
def test_a_file_is_as_large_as_its_bytes(letter: str, tmp_path: Path) -> None:
    # The end counts: what was read of a file that is too large must not be taken for all of it.
    end = "\nsteps: 5\n"
    room = 100_000 - len(f"# {end}")
    filled = letter * (room // len(letter.encode())) + "x" * (room % len(letter.encode()))
    path = tmp_path / "large.yaml"
    path.write_text(f"# {filled}{end}", encoding="utf-8")
    assert path.stat().st_size == 100_000
    assert read(path) == {"steps": 5}
    for more in ("x", letter):
        path.write_text(f"# {more}{filled}{end}", encoding="utf-8")
        with pytest.raises(
            ValueError, match=r"large\.yaml: a config file may have 100,000 bytes at most; no config is"
        ):
            read(path)
