"""Hostile configs: each is refused in one line, runs and writes nothing, and reveals no secret."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuselayers.cli.main import main
from fuselayers.configs import compose

_SECRET = "the-secret-of-the-environment"
_WRITES = {"os.system", "os.mkdir", "os.rename", "os.remove", "os.exec", "os.posix_spawn", "subprocess.Popen"}
_WRITES |= {"socket.connect", "shutil.rmtree", "os.symlink", "os.link"}
_CALL = "is refused: a config names registered components, it cannot call code"
_STAND_ALONE = "${...} may only stand alone and name another value"
_RESOLVER = f"is refused: {_STAND_ALONE}"
_TAG = "YAML tags are refused, got one in line"

# One case for each place (group, option, component within a component, layer, path) and each reason to refuse.
_OVERRIDES = [
    ("_target_=os.system", f"'_target_' {_CALL}"),
    ("feedforward={_target_: builtins.eval, _args_: [1]}", f"'feedforward._target_' {_CALL}"),
    ("model.layers=[{at: 0, feedforward: {_target_: os.system}}]", f"'model.layers[0].feedforward._target_' {_CALL}"),
    ("feedforward=torch.nn.Linear", "no feedforward 'torch.nn.Linear'"),
    ("model=../../../etc/passwd", "no model '../../../etc/passwd'"),
    ("model=${oc.env:HOME}", f"model='${{oc.env:HOME}}' {_RESOLVER}"),
    ("train.output='${train.${oc.env:HOME}}'", _RESOLVER),
    ("hydra/launcher=basic", "no config group 'hydra/launcher'"),
    ("train.steps=glob(*)", "is refused: every option already has its place and takes one value, so write group"),
    ("train.steps=" + "[" * 1000 + "]" * 1000, f"cannot read the override '{'train.steps='.ljust(79, '[')}...: write"),
    ("train.steps=[[[[[[[[1]]]]]]]]", "is nested deeper than the 8 levels allowed"),
    ("model={1: 2}", "the keys of model must be text, got 1"),
    # A shell command, an escape, an option of Hydra, a deletion and nothing.
    ("model.name='$(touch TOUCHED)'", "no model '$(touch TOUCHED)'"),
    ("model.name=\x1b[2J", "cannot read the override"),
    ("--config-path=/etc", "cannot read the override"),
    ("~model", "is refused: every option already has its place"),
    ("", "cannot read the override ''"),
]

# One case for each feature of YAML that a config may not use, and for each way to name something that is no group.
_FILES = [
    ("model: {block: {_target_: torch.hub.load, name: transformer}}", f"'model.block._target_' {_CALL}"),
    ("model: !!python/object/apply:os.system ['touch TOUCHED']", f"{_TAG} 1"),
    ("train: &t {steps: 5}\ndata: *t", "YAML anchors are refused, got one in line 1: write the value out"),
    ("train:\n  output: '${oc.env:HOME}'", f"line 2: {_STAND_ALONE}"),
    ("hydra: {searchpath: [/tmp]}", "no config group 'hydra'"),
    ("defaults: [/etc/passwd]", "an entry of defaults must be group: choice, got '/etc/passwd'"),
    (f"{'x' * 100}: 1\n{'x' * 100}: 2", f"not YAML, line 2: found duplicate key '{'x' * 79}..."),
    ("a: " + "[" * 600 + "]" * 600, "theirs.yaml is nested deeper than the 8 levels allowed"),
    ("# " + "x" * 100_001, "a config file may have at most 100,000 bytes"),
    # Files that hold a secret, and bytes that are no text.
    (f"our_key: {{user: [{_SECRET}]}}", "no config group 'our_key'"),
    (f"train: {{our_key: 1}} # {_SECRET}", "no train option 'our_key'"),
    (_SECRET, "a config must be a mapping of groups, got a single value"),
    (f"a: '{_SECRET}", "not YAML, line 1: "),
    ("model: gpt_nano\n---\n{}", "not YAML, line 2: "),
    ("\x00", "not YAML"),
]


class _Watch:
    """Record what Python runs, connects to or writes, by its audit events. An audit hook cannot be removed."""

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.seen is None:
            return
        flags = arguments[2] if event == "open" else 0
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in _WRITES or writes:
            self.seen.append(f"{event} {arguments}"[:300])

    @contextmanager
    def nothing_happens(self) -> Iterator[None]:
        self.seen = seen = []
        try:
            yield
        finally:
            self.seen = None
        assert seen == [], seen


@pytest.fixture(scope="module")
def watch() -> _Watch:
    return _Watch()


@pytest.fixture(autouse=True)
def _an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", _SECRET)
    # The first config fills the caches of later ones.
    compose()


@pytest.mark.parametrize(("override", "text"), _OVERRIDES, ids=[override[:30] for override, _ in _OVERRIDES])
def test_overrides(override: str, text: str, watch: _Watch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with watch.nothing_happens():
        assert main(["train", "--", override, "data.path=/nowhere"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("fuselayers: ")
    assert text in errors
    assert errors.count("\n") == 1
    assert len(errors) < 2000
    assert _SECRET not in errors
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("content", "text"), _FILES, ids=[content[:30] for content, _ in _FILES])
def test_files(content: str, text: str, watch: _Watch, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(content, encoding="utf-8")
    with watch.nothing_happens(), pytest.raises(ValueError, match=re.escape(text)) as caught:
        compose(path)
    assert _SECRET not in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert [*tmp_path.iterdir()] == [path]
