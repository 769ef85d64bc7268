"""A file with damaged bytes is refused by its name, or does no harm. No wrong content is read silently."""

import random
import warnings
from pathlib import Path

import pytest

from fuselayers.configs import compose, to_yaml
from fuselayers.partition import machine_of
from fuselayers.partition.choose.machine import write_tuned
from tests.reliability.cases import Cases


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


def test_a_config_with_damaged_bytes(cases: Cases, tmp_path: Path) -> None:
    """It composes to some config, or is refused with a short text; no other error is raised."""
    path, content = tmp_path / "config.yaml", to_yaml(compose())

    def check(random: random.Random) -> None:
        path.write_text(content)
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
