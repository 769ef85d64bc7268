"""Hostile configs: each is refused in one line, runs and writes nothing, and reveals no secret."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuselayers.cli.main import main
from fuselayers.configs import compose
from tests.configs.test_compose_hostile import FILES, OVERRIDES

_SECRET = "the-secret-of-the-environment"
_WRITES = {"os.system", "os.mkdir", "os.rename", "os.remove", "os.exec", "os.posix_spawn", "subprocess.Popen"}
_WRITES |= {"socket.connect", "shutil.rmtree", "os.symlink", "os.link"}
# Overrides whose text another file tests, a shell command, an escape, an option of Hydra, a deletion and nothing.
_OVERRIDES = (
    *(override for override, _ in OVERRIDES),
    "model.name='$(touch TOUCHED)'",
    "model.name=\x1b[2J",
    "--config-path=/etc",
    "~model",
    "",
)
# Files whose text another file tests, files that hold a secret, and bytes that are no text.
_FILES = (
    *(content for content, _ in FILES),
    f"our_key: {{user: [{_SECRET}]}}",
    f"train: {{our_key: 1}} # {_SECRET}",
    _SECRET,
    f"a: '{_SECRET}",
    "model: gpt_nano\n---\n{}",
    "\x00",
)


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


@pytest.mark.parametrize("override", _OVERRIDES, ids=lambda override: override[:30])
def test_overrides(override: str, watch: _Watch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with watch.nothing_happens():
        assert main(["train", "--", override, "data.path=/nowhere"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert errors.startswith("fuselayers: ")
    assert len(errors) < 2000
    assert _SECRET not in errors
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("content", _FILES, ids=lambda content: content[:30])
def test_files(content: str, watch: _Watch, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(content, encoding="utf-8")
    with watch.nothing_happens(), pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is read below)
        compose(path)
    assert _SECRET not in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert [*tmp_path.iterdir()] == [path]
