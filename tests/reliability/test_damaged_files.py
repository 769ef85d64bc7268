"""Files with damaged bytes: each is refused by name, or does no harm; nothing is read wrongly without a word."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fuselayers.cli.main import main
from fuselayers.configs import compose
from fuselayers.partition import machine_of
from fuselayers.partition.machine import write_tuned
from tests.reliability.runs import STEPS, assert_same_run
from tests.reliability.tally import Tally


def _flip(content: bytearray, random: random.Random) -> None:
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def _zero(content: bytearray, random: random.Random) -> None:
    start = random.randrange(len(content))
    length = len(content[start : start + random.choice((1, 16, 512))])
    content[start : start + length] = bytes(length)


def _cut(content: bytearray, random: random.Random) -> None:
    del content[random.randrange(len(content)) :]


def _insert(content: bytearray, random: random.Random) -> None:
    start = random.randrange(len(content))
    content[start:start] = random.randbytes(random.choice((1, 7, 300)))


_DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (_flip, _flip, _flip, _zero, _cut, _insert)


def _damage(path: Path, random: random.Random) -> str:
    """Damage the file; return how, for errors."""
    content = bytearray(path.read_bytes())
    how = random.choice(_DAMAGES)
    how(content, random)
    path.write_bytes(content)
    return f"{how.__name__} in {path.name}"


def _contents(run: Path) -> dict[str, bytes]:
    """The files of a run, but for the lock, which names its last holder."""
    files = [path for path in run.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


_CHECKPOINT = f"checkpoints/step-{STEPS:06}"


@pytest.mark.parametrize(
    "name", [f"{_CHECKPOINT}/rank-00000.bin", f"{_CHECKPOINT}/index.json", "metrics.csv", "config.yaml"]
)
def test_a_run_with_a_damaged_file(
    name: str, tally: Tally, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is continued exactly, or refused in one line that names a file of the run, and left as it is."""
    run = tmp_path / "run"

    def check(random: random.Random) -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole / "run", run)
        how = _damage(run / name, random)
        before = _contents(run)
        code = main(["train", f"train.resume={run}"])
        errors = capsys.readouterr().err
        if code == 0:
            assert_same_run(run, whole / "run")
        else:
            assert code == 2, how
            assert errors.count("\n") == 1, errors
            damaged = run / name
            assert str(damaged.parent if _CHECKPOINT in name else damaged) in errors, errors
            assert _contents(run) == before

    tally.seeds(check, few=2, all=200)


def test_a_config_with_damaged_bytes(tally: Tally, whole: Path, tmp_path: Path) -> None:
    """It composes to some config, or is refused with a short text; no other error comes out."""
    path = tmp_path / "config.yaml"

    def check(random: random.Random) -> None:
        shutil.copyfile(whole / "run" / "config.yaml", path)
        how = _damage(path, random)
        said = "composed"
        try:
            compose(path)
        except ValueError as error:
            said = str(error)
        assert 0 < len(said) < 1000, how

    tally.seeds(check, few=30, all=500)


def test_a_damaged_file_of_the_machine_stops_no_call(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    path = write_tuned("cpu", machine_of("cpu"))
    whole = path.read_bytes()

    def check(random: random.Random) -> None:
        path.write_bytes(whole)
        _damage(path, random)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* is no file as fuselayers writes it")
            assert machine_of("cpu").bandwidth > 0

    tally.seeds(check, few=3, all=100)
