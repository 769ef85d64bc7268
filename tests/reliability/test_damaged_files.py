"""A file with damaged bytes is refused by its name, or does no harm. No wrong content is read silently."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import pytest

from fuselayers.cli.main import main
from fuselayers.configs import compose
from fuselayers.partition import machine_of
from fuselayers.partition.choose.machine import write_tuned
from tests.cli.train.conftest import files, run_train
from tests.reliability.cases import Cases
from tests.reliability.runs import STEPS, assert_same_run

_CHECKPOINT = f"checkpoints/step-{STEPS:06}"


def _damage(path: Path, random: random.Random) -> None:
    """Flip a bit, overwrite or insert some bytes, or cut the file's end off."""
    content = bytearray(path.read_bytes())
    start = random.randrange(len(content))
    how = random.choice(("flip", "flip", "zero", "cut", "insert"))
    if how == "flip":
        content[start] ^= 1 << random.randrange(8)
    elif how == "zero":
        content[start : start + 16] = bytes(len(content[start : start + 16]))
    elif how == "cut":
        del content[start:]
    else:
        content[start:start] = random.randbytes(7)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        f"{_CHECKPOINT}/shard-00001-model-00001-of-00001.safetensors",
        f"{_CHECKPOINT}/manifest.json",
        "metrics.csv",
        "config.yaml",
    ],
)
def test_a_run_with_a_damaged_file_is_continued_exactly(
    name: str, cases: Cases, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def check(random: random.Random) -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole / "run", run)
        _damage(run / name, random)
        if _CHECKPOINT in name and files(run) != files(whole / "run"):
            capsys.readouterr()  # the output of the case before
            code = main(["export", str(run / _CHECKPOINT), "--out", str(tmp_path / "model")])
            errors = capsys.readouterr().err
            # Damage to the space between the entries of a manifest is harmless.
            assert code == 0 or (errors.count("\n") == 1 and str(run / _CHECKPOINT) in errors), errors
            shutil.rmtree(tmp_path / "model", ignore_errors=True)
        run_train([f"train.resume={run}"])
        assert_same_run(run, whole / "run")

    cases.of_seeds(check, few=1, all=100)


def test_a_config_with_damaged_bytes(cases: Cases, whole: Path, tmp_path: Path) -> None:
    """It composes to some config, or is refused with a short text; no other error is raised."""
    path = tmp_path / "config.yaml"

    def check(random: random.Random) -> None:
        shutil.copyfile(whole / "run" / "config.yaml", path)
        _damage(path, random)
        said = "composed"
        try:
            compose(path)
        except ValueError as error:
            said = str(error)
        assert 0 < len(said) < 1000

    cases.of_seeds(check, few=30, all=500)


def test_a_damaged_file_of_the_machine_stops_no_call(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    path = write_tuned("cpu", machine_of("cpu"))
    content = path.read_bytes()

    def check(random: random.Random) -> None:
        path.write_bytes(content)
        _damage(path, random)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* was not written by fuselayers")
            assert machine_of("cpu").bandwidth > 0

    cases.of_seeds(check, few=3, all=100)
