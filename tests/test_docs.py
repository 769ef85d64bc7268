"""The pages are true: python blocks run, and the commands in shell blocks exist.

The python blocks of a page form one program, in order. It runs in a new process and an empty folder, as for a reader.
"""

import argparse
import importlib
import inspect
import os
import re
import shlex
import subprocess
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from fuselayers import ops
from fuselayers.cli.main import main
from fuselayers.cli.plan.command import read_arguments
from fuselayers.components import KINDS, get, names
from fuselayers.configs import compose
from fuselayers.configs.build import split_source
from tests.processes import run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Commands of shell blocks that the reader's machine provides.
FOREIGN = {"apt", "cd", "eval", "git", "pip", "pre-commit", "source"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line in the page, and its lines."""

    language: str
    first_line: int
    lines: list[str]


def _blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for token in MarkdownIt().parse(text):
        if token.type == "fence":
            start, end = token.map or (0, 0)
            assert text.splitlines()[end - 1].strip() == token.markup, f"{page}:{start + 1}: the block is not closed"
            blocks.append(Block(token.info, start + 2, token.content.splitlines()))
    return blocks


def _program(blocks: list[Block]) -> str:
    """The python blocks as one file. Each line keeps its number, so that errors name the lines of the page."""
    lines: list[str] = []
    for block in blocks:
        if block.language == "python":
            lines += [""] * (block.first_line - 1 - len(lines)) + block.lines
    return "\n".join(lines) + "\n"


def _failure(page: Path, folder: Path) -> str | None:
    """Run a page, and return None or the file, line, error and traceback of its failure."""
    done = run(_program(_blocks(page)), name=str(page), folder=folder)
    if done.code == 0:
        return None
    errors = done.errors.strip()
    lines = re.findall(rf'File "{re.escape(str(page))}", line (\d+)', errors)
    return f"{page}:{lines[-1] if lines else '?'}: {errors.splitlines()[-1] if errors else done.code}\n\n{errors}"


def _has(page: Path, *languages: str) -> bool:
    return any(block.language in languages for block in _blocks(page))


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# The first pages of a new user run every day; all others are slow.
_DAILY = {
    *("README.md", "docs/first_steps.md", "docs/build_from_config.md", "docs/import_layers.md", "docs/swap.md"),
    "docs/coming_from_xformers.md",
}


def _with(*languages: str) -> list[Any]:
    """The pages with blocks of these languages, as parameters of a test."""
    return [
        pytest.param(page, marks=() if _name(page) in _DAILY else pytest.mark.slow, id=_name(page))
        for page in PAGES
        if _has(page, *languages)
    ]


@pytest.mark.parametrize("page", _with("python"))
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    failure = _failure(page, tmp_path)
    if failure is not None:
        pytest.fail(failure, pytrace=False)


def _commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the words of each command in the page's shell blocks."""
    for block in _blocks(page):
        if block.language in {"bash", "sh", "shell", "console"}:
            start, pending = block.first_line, ""
            for number, line in enumerate(block.lines, start=block.first_line):
                start = start if pending else number
                if line.endswith("\\"):
                    pending += line[:-1]
                    continue
                words = shlex.split((pending + line).removeprefix("$ "), comments=True)
                pending = ""
                if words:
                    yield start, words


def _check_command(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str | None:
    """Return None if the command exists with these arguments, else the problem."""
    for place in range(1, len(words) - 1):
        if words[place : place + 2] == ["-m", "fuselayers"]:  # of python, or of a launcher such as torchrun
            return _check_command(words[place + 1 :], monkeypatch, capsys)
    if re.match(r"\w+=", words[0]):  # sets a variable of the shell
        return None
    if words[0] == "make":
        clean = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}}
        arguments = ["make", "--dry-run", *words[1:]]
        done = subprocess.run(arguments, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
        overrides = [word.partition("=")[2] for word in words if word.startswith("ARGS=") and "train" in words]
        if done.returncode == 0 and overrides:
            return _check_command(["fuselayers", "train", *shlex.split(overrides[0])], monkeypatch, capsys)
        return done.stderr.strip() if done.returncode else None
    if words[0] == "fuselayers":
        _measure_nothing(monkeypatch)
        code = main([word for word in words[1:] if word != "--"])
        return capsys.readouterr().err.strip() if code else None
    return None if words[0] in FOREIGN else f"no such command: {words[0]}"


def _measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands that take minutes, or write files, stop after they have read their arguments."""

    def only_compose(arguments: argparse.Namespace, _: object) -> int:
        subject = getattr(arguments, "subject", None)
        if subject == "op" and not hasattr(ops, arguments.name):
            raise ValueError(f"no op {arguments.name!r}")
        file, overrides = split_source(getattr(arguments, "overrides", []))
        compose(arguments.name if subject == "model" else file or "gpt_nano", overrides)
        return 0

    def only_compose_plan(arguments: argparse.Namespace, console: object) -> int:
        overrides, _ = read_arguments(arguments.overrides)
        return only_compose(argparse.Namespace(overrides=overrides), console)

    monkeypatch.setattr(importlib.import_module("fuselayers.cli.plan"), "run", only_compose_plan)
    for command in ("train", "bench", "explain", "tune", "export"):
        monkeypatch.setattr(importlib.import_module(f"fuselayers.cli.{command}"), "run", only_compose)


@pytest.mark.parametrize("page", _with("bash", "sh", "shell", "console"))
def test_shell_commands_exist(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    problems = ((line, _check_command(words, monkeypatch, capsys)) for line, words in _commands(page))
    assert [f"{_name(page)}:{line}: {problem}" for line, problem in problems if problem is not None] == []


_DIRECTIVE = re.compile(r"^\.\. (currentmodule|auto(?:function|class|data|exception))::[ ]+(\S+)$", flags=re.MULTILINE)


def _shown(page: Path) -> list[str]:
    """The names that a page of the reference describes, with their package."""
    package, shown = "", []
    for directive, name in _DIRECTIVE.findall(page.read_text(encoding="utf-8")):
        if directive == "currentmodule":
            package = name
        else:
            shown.append(name if name.startswith("fuselayers.") else f"{package}.{name}")
    return shown


def test_the_reference_has_every_public_name_once_and_nothing_else() -> None:
    shown = [name for page in (ROOT / "docs" / "api").rglob("*.md") for name in _shown(page)]
    public = {
        f"fuselayers.{layer}.{name}"
        for layer in ("partition", "ops", "components", "components.swap", "configs", "testing")
        for name, value in vars(importlib.import_module(f"fuselayers.{layer}")).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    missing = public - set(shown)
    assert not missing, f"no page of docs/api describes {sorted(missing)}: name them in one, and see docs/add_an_op.md"
    assert sorted(shown) == sorted({*public, "fuselayers.cli.main.main"})


def test_every_kind_of_component_has_a_page_of_its_own() -> None:
    for kind in KINDS:
        ours = {get(kind, name) for name in names(kind)}
        classes = {value.__name__ for value in ours if value.__module__.startswith("fuselayers.")}
        shown = _shown(ROOT / "docs" / "api" / "components" / f"{kind}.md")
        assert {f"fuselayers.components.{name}" for name in classes} - set(shown) == set()


def test_every_op_has_a_page_of_its_own() -> None:
    takes_a_backend = {
        name
        for name, value in vars(ops).items()
        if isinstance(value, types.FunctionType) and "backend" in inspect.signature(value).parameters
    }
    assert "rotary" in takes_a_backend
    for name in takes_a_backend:
        page = ROOT / "docs" / "api" / "ops" / f"{name}.md"
        assert page.exists(), f"the op {name} has no page: add docs/api/ops/{name}.md, and see docs/add_an_op.md"
        assert _shown(page) == [f"fuselayers.ops.{name}"]
