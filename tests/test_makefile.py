"""The commands of the first screen: what they say on a machine that cannot run them, and that they install once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # A `make test` around this test hands its own options down in these variables.
    clean = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=clean, capture_output=True, text=True, check=False)


def _python(path: Path, *, fails_at: str, version: str) -> Path:
    """A stand-in for a Python that fails as soon as its program contains `fails_at`."""
    path.write_text(f'#!/bin/sh\ncase "$*" in --version) echo "Python {version}";; *{fails_at}*) exit 1;; esac\n')
    path.chmod(0o755)
    return path


def test_no_python(tmp_path: Path) -> None:
    done = _make("train", f"VENV={tmp_path}/venv", "PYTHON=no_such_python")
    assert done.returncode != 0
    assert "no 'no_such_python' here; install Python 3.10 to 3.13, or name one: make PYTHON=" in done.stderr


def test_python_is_too_old(tmp_path: Path) -> None:
    python = _python(tmp_path / "python", fails_at="version_info", version="3.9.18")
    done = _make("train", f"VENV={tmp_path}/venv", f"PYTHON={python}")
    assert done.returncode != 0
    wanted = f"needs Python 3.10 to 3.13, '{python}' is Python 3.9.18; name another one: make PYTHON=python3.12"
    assert wanted in done.stderr


def test_python_without_venv(tmp_path: Path) -> None:
    python = _python(tmp_path / "python", fails_at="ensurepip", version="3.11.2")
    done = _make("test", f"VENV={tmp_path}/venv", f"PYTHON={python}")
    assert done.returncode != 0
    wanted = f"'{python}' cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"
    assert wanted in done.stderr


@pytest.mark.parametrize("target", ["train", "test", "test-all", "lint"])
def test_a_second_run_installs_nothing(target: str, tmp_path: Path) -> None:
    first = _make("--dry-run", target, f"VENV={tmp_path}")
    assert "pip install -e '.[test]'" in first.stdout
    (tmp_path / ".installed-test").touch()
    second = _make("--dry-run", target, f"VENV={tmp_path}")
    assert second.returncode == 0
    assert "pip install" not in second.stdout


def test_train_passes_its_overrides_on(tmp_path: Path) -> None:
    done = _make("--dry-run", "train", f"VENV={tmp_path}", "ARGS=train.steps=5 feedforward=mlp")
    assert f"{tmp_path}/bin/python -m fuselayers train train.steps=5 feedforward=mlp" in done.stdout


def test_continuous_integration_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]


@pytest.mark.parametrize(("first", "interpreted", "passes"), [(0, 0, True), (0, 5, True), (0, 1, False), (5, 0, False)])
def test_only_the_interpreted_run_may_find_no_test(
    first: int, interpreted: int, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    cases = f'" "*pytest*) exit {first};; 1*) exit {interpreted};;'
    python.write_text(f'#!/bin/sh\ncase "$TRITON_INTERPRET $*" in {cases} esac\n')
    python.chmod(0o755)
    (tmp_path / ".installed-test").touch()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert (_make("test", f"VENV={tmp_path}").returncode == 0) is passes
