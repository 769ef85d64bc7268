"""Hostile values, and what an error may quote; tests/reliability/test_hostile_configs.py has overrides and files."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselayers.configs import compose


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (print, "builtin_function_or_method"),
        (torch.nn.Mish(), "Mish; register its class with components.register, and write the name$"),
    ],
)
def test_objects_in_a_mapping(value: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"train.output must be text, a number, .* got a {kind}"):
        compose({"train": {"output": value}})


def test_a_mapping_that_holds_itself() -> None:
    endless: dict[str, Any] = {}
    endless["model"] = endless
    with pytest.raises(ValueError, match=r"model.* is nested deeper than the 8 levels allowed"):
        compose(endless)


@pytest.mark.parametrize(
    "content",
    # A scalar, a reference, a tag, an anchor, broken quotes, and a secret in place of a section's options.
    [
        "my secret",
        "password: my secret",
        "a: *my_secret",
        'a: "\\my \\secret"',
        "model: [my secret]",
    ],
)
def test_a_file_that_is_no_config_is_not_quoted(content: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"theirs\.txt: |no config group |must be a |must be the name of a ") as caught:
        compose(str(path))
    assert "secret" not in "".join(traceback.format_exception(caught.value))


LONG = "x" * 9000


@pytest.mark.parametrize(
    ("source", "overrides"),
    # A choice, a group, an option, values of two types, an override, a source, and entries of a mapping.
    [
        ("gpt_nano", [f"feedforward={LONG}"]),
        ("gpt_nano", [f"feedforward.{LONG}=1"]),
        ("gpt_nano", [f"train.steps=[{LONG}]"]),
        (LONG, []),
        ({"train": {"steps": 10**5000}}, []),
        ({"defaults": [LONG]}, []),
    ],
    ids=range(6),
)
def test_an_error_quotes_the_beginning_of_a_long_value(source: Any, overrides: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        compose(source, overrides)
    assert len(str(caught.value)) < 800
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["train.steps", "model.num_layers"])
def test_a_number_beyond_torchs_sizes_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=rf"^{option} must be below 2\*\*63, got 10{{30}}$"):
        compose("gpt_nano", [f"{option}={10**30}"])
