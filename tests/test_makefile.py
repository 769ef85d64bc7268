"""The commands of the first screen: what they say on a machine that cannot run them, and that they install once."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
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


def test_python_is_too_old(tmp_path: Path) -> None:
    python = _python(tmp_path / "python", fails_at="version_info", version="3.9.18")
    done = _make("train", f"VENV={tmp_path}/venv", f"PYTHON={python}")
    assert done.returncode != 0
    wanted = f"needs Python 3.11 to 3.13, '{python}' is Python 3.9.18; name another one: make PYTHON=python3.12"
    assert wanted in done.stderr


@pytest.mark.parametrize(
    ("target", "extra"), [("train", "plots"), ("test", "test"), ("test-all", "test"), ("test-file", "test")]
)
def test_a_second_run_installs_nothing(target: str, extra: str, tmp_path: Path) -> None:
    first = _make("--dry-run", target, f"VENV={tmp_path}")
    assert re.findall(r"pip install -e '\.\[(\w+)\]'", first.stdout) == [extra]
    (tmp_path / f".installed-{extra}").touch()
    second = _make("--dry-run", target, f"VENV={tmp_path}")
    assert second.returncode == 0
    assert "pip install" not in second.stdout


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


@pytest.mark.parametrize("failing", ["ruff check", "ruff format", "mypy"])
def test_lint_that_fails_beside_the_tests_fails_make_test(failing: str, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\ncase "$*" in *"{failing}"*) echo "said by {failing}"; exit 1;; esac\n')
    python.chmod(0o755)
    (tmp_path / ".installed-test").touch()
    done = _make("test", f"VENV={tmp_path}")
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1] == f"said by {failing}"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there are no kernels without Triton")
def test_gpu_can_be_tried_without_a_gpu(tmp_path: Path) -> None:
    done = _make("gpu-dry", f"PYTHON={sys.executable}", f"GPU_OUT={tmp_path}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert {"results.json", "results.md"} <= {path.name for path in (tmp_path / "suite").iterdir()}
    assert "test_the_gradients_of_a_norm" in done.stdout
