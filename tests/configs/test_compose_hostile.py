"""Hostile configs: `compose` refuses each of them with an error, and runs none of their code."""

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselayers.configs import compose

CALL = "is refused: a config names registered components, it cannot call code"
STAND_ALONE = "${...} may only stand alone and name another value"
RESOLVER = f"is refused: {STAND_ALONE}"
TAG = "YAML tags are refused, got one in line"

# One case for each place (group, option, component within a component, layer, path) and each reason to refuse.
OVERRIDES = [
    ("_target_=os.system", f"'_target_' {CALL}"),
    ("feedforward={_target_: builtins.eval, _args_: [1]}", f"'feedforward._target_' {CALL}"),
    ("model.layers=[{at: 0, feedforward: {_target_: os.system}}]", f"'model.layers[0].feedforward._target_' {CALL}"),
    ("feedforward=torch.nn.Linear", "no feedforward 'torch.nn.Linear'"),
    ("model=../../../etc/passwd", "no model '../../../etc/passwd'"),
    ("model=${oc.env:HOME}", f"model='${{oc.env:HOME}}' {RESOLVER}"),
    ("train.output='${train.${oc.env:HOME}}'", RESOLVER),
    ("hydra/launcher=basic", "no config group 'hydra/launcher'"),
    ("train.steps=glob(*)", "is refused: every option already has its place and takes one value, so write group"),
    ("train.steps=" + "[" * 1000 + "]" * 1000, f"cannot read the override '{'train.steps='.ljust(79, '[')}...: write"),
    ("train.steps=[[[[[[[[1]]]]]]]]", "is nested deeper than the 8 levels allowed"),
    ("model={1: 2}", "the keys of model must be text, got 1"),
]


@pytest.mark.parametrize(("override", "text"), OVERRIDES, ids=[override[:40] for override, _ in OVERRIDES])
def test_overrides(override: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "the secret")
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        compose(overrides=[override])
    assert "the secret" not in str(caught.value)


# One case for each feature of YAML that a config may not use, and for each way to name something that is no group.
FILES = [
    ("model: {block: {_target_: torch.hub.load, name: transformer}}", f"'model.block._target_' {CALL}"),
    ("model: !!python/object/apply:os.system ['touch TOUCHED']", f"{TAG} 1"),
    ("train: &t {steps: 5}\ndata: *t", "YAML anchors are refused, got one in line 1: write the value out"),
    ("train:\n  output: '${oc.env:HOME}'", f"line 2: {STAND_ALONE}"),
    ("hydra: {searchpath: [/tmp]}", "no config group 'hydra'"),
    ("defaults: [/etc/passwd]", "an entry of defaults must be group: choice, got '/etc/passwd'"),
    (f"{'x' * 100}: 1\n{'x' * 100}: 2", f"not YAML, line 2: found duplicate key '{'x' * 79}..."),
    ("a: " + "[" * 600 + "]" * 600, "theirs.yaml is nested deeper than the 8 levels allowed"),
    ("# " + "x" * 100_001, "a config file may have at most 100,000 bytes"),
]


@pytest.mark.parametrize(("content", "text"), FILES, ids=[content[:40] for content, _ in FILES])
def test_files(content: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "the secret")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(content)
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        compose("./theirs.yaml")
    assert "the secret" not in str(caught.value)
    assert not (tmp_path / "TOUCHED").exists()


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
