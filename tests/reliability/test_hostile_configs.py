"""Configs that a grammar of hostile pieces makes: each is answered in one line, and nothing is run or written."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuselayers.cli.main import main
from fuselayers.configs import compose
from tests.reliability.tally import Tally

_SECTIONS = (
    "model",
    "attention",
    "feedforward",
    "norm",
    "residual",
    "position",
    "block",
    "fusion",
    "train",
    "data",
    "parallel",
)
_KEYS = (
    "name",
    "_target_",
    "_args_",
    "_partial_",
    "layers",
    "steps",
    "output",
    "path",
    "hidden_dim",
    "eps",
    "${x}",
    "",
)
_SECRET = "the-secret-of-the-environment"
_CODE = (
    "os.system",
    "builtins.eval",
    "builtins.exec",
    "subprocess.run",
    "pathlib.Path.touch",
    "torch.load",
    "torch.hub.load",
    "antigravity",
)
_TEXTS = (
    "",
    "null",
    "~",
    "true",
    "../../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "${oc.env:HOSTILE}",
    "${oc.decode:1}",
    "${hydra:runtime.cwd}",
    "${now:%Y}",
    "${train.output}",
    "${" * 30,
    "$(touch TOUCHED)",
    "`touch TOUCHED`",
    "; touch TOUCHED",
    "__import__('os').mkdir('TOUCHED')",
    "\N{ZERO WIDTH SPACE}",
    "\N{RIGHT-TO-LEFT OVERRIDE}",
    "\x00",
    "\x1b[2J",
    "\\n",
    "x" * 3000,
    "gpt_nano",
    "mlp",
)
_NUMBERS = ("0", "-1", "1e9", "1e400", "nan", "-inf", ".inf", "1_000", "0x10", "9" * 40, "9" * 5000, "1.5", "- 1")
_TAGS = (
    "!!python/object/apply:",
    "!!python/name:",
    "!!python/module:",
    "!!int ",
    "!env ",
    "&a ",
    "*a ",
    "!!binary ",
    "<<: ",
)
_WRITES = {"os.system", "os.mkdir", "os.rename", "os.remove", "os.exec", "os.posix_spawn", "subprocess.Popen"}
_WRITES |= {"socket.connect", "shutil.rmtree", "os.symlink", "os.link"}


def _value(random: random.Random, depth: int = 3) -> str:
    """A value in the syntax that Hydra's overrides and YAML's flow style share."""
    kinds = [
        lambda: random.choice(_TEXTS),
        lambda: repr(random.choice(_TEXTS)),
        lambda: random.choice(_NUMBERS),
        lambda: random.choice(_CODE),
    ]
    if depth:
        kinds += [
            lambda: f"[{', '.join(_value(random, depth - 1) for _ in range(random.randint(0, 3)))}]",
            lambda: f"{{{', '.join(_entry(random, depth - 1) for _ in range(random.randint(0, 3)))}}}",
            lambda: "[" * random.choice((9, 300, 3000)),
            lambda: f"{{_target_: {random.choice(_CODE)}, _args_: [touch TOUCHED]}}",
        ]
    return random.choice(kinds)()


def _entry(random: random.Random, depth: int) -> str:
    return f"{random.choice((*_KEYS, *_SECTIONS))}: {_value(random, depth)}"


def _override(random: random.Random) -> str:
    path = ".".join([random.choice(_SECTIONS), *random.choices(_KEYS, k=random.randint(0, 3))])
    special = ("hydra.run.dir", "hydra.searchpath", "hydra/launcher", "defaults", "--config-path", "searchpath", "")
    prefix = random.choice(("", "", "", "", "+", "++", "~", "@"))
    return prefix + random.choice((path, path, path, random.choice(special))) + random.choice("====:@") + _value(random)


def _file(random: random.Random) -> str:
    lines = []
    for _ in range(random.randint(1, 5)):
        tag = random.choice(_TAGS) + random.choice((random.choice(_CODE) + " ", "")) if random.random() < 0.3 else ""
        indent = random.choice(("", "", "", "  ", "\t"))
        lines.append(f"{indent}{random.choice((*_SECTIONS, *_KEYS, 'defaults', 'hydra'))}: {tag}{_value(random)}")
    # A secret in place of a section's options, or beside no known key: the file may be none of ours.
    if random.random() < 0.3:
        section = random.choice(_SECTIONS)
        secrets = (f"{section}: [{_SECRET}]", f"our_key: {_SECRET}", f"our_key: {{user: [{_SECRET}]}}", f"- {_SECRET}")
        lines.insert(
            random.randint(0, len(lines)), random.choice((*secrets, _SECRET, f"# {_SECRET}", f"a: '{_SECRET}"))
        )
    return "\n".join(lines) + random.choice(("", "\n", "\n---\n{}", "\n...", "\x00"))


class _Watch:
    """What Python was asked to do beyond computing, told by its audit events; a hook stays for the process's life."""

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.seen is None:
            return
        flags = arguments[2] if event == "open" else 0
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in _WRITES or writes or (event == "import" and arguments[0] == "antigravity"):
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
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("HOSTILE", _SECRET)
    # A first config makes what later ones share.
    compose()


def test_the_watch_sees_what_is_written_and_run(watch: _Watch, tmp_path: Path) -> None:
    for act in (lambda: (tmp_path / "file").touch(), lambda: (tmp_path / "made").mkdir(), lambda: os.system("true")):
        with pytest.raises(AssertionError), watch.nothing_happens():
            act()


def test_overrides(tally: Tally, watch: _Watch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(random: random.Random) -> None:
        overrides = [_override(random) for _ in range(random.randint(1, 3))]
        # What is a right override may pass: the run then ends at its text, before anything is written.
        with watch.nothing_happens():
            code = main(["train", "--", *overrides, "data.path=/nowhere", "data.suffixes=[.py]"])
        errors = capsys.readouterr().err
        assert code == 2, (overrides, errors)
        assert errors.count("\n") == 1, (overrides, errors)
        assert errors.startswith("fuselayers: "), (overrides, errors)
        assert _SECRET not in errors, (overrides, errors)
        assert "Traceback" not in errors, (overrides, errors)
        assert [*(tmp_path / "empty").iterdir()] == []

    tally.seeds(check, few=50, all=3000)


def test_files(tally: Tally, watch: _Watch, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"

    def check(random: random.Random) -> None:
        content = _file(random)
        path.write_text(content, encoding="utf-8")
        with watch.nothing_happens():
            try:
                compose(path)
            except ValueError as error:
                said = str(error)
            else:
                said = ""
        assert _SECRET not in said, (content, said)
        assert len(said) < 2000, (content, said)
        assert [*(tmp_path / "empty").iterdir()] == []

    tally.seeds(check, few=100, all=5000)
