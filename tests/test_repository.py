"""The files that GitHub, pre-commit and citation tools read are valid, and agree with the package."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import fuselayers

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # A `make test` around this test would pass its options on in these variables.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=clean, capture_output=True, text=True, check=False)


def _yaml(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_targets_of_make_that_exist(path: Path) -> None:
    workflow = _yaml(path)
    assert True in workflow  # `on`, which YAML reads as a boolean
    for name, job in workflow["jobs"].items():
        assert re.fullmatch(r"ubuntu-[\d.]+(-arm)?|\$\{\{ matrix\.runner \}\}", job["runs-on"]), name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            words = shlex.split(step.get("run", ""))
            if words[:1] == ["make"]:
                done = _make("--dry-run", "VENV=/nowhere", *words[1:])
                assert done.returncode == 0, done.stderr


def test_make_train_says_that_python_is_too_old(tmp_path: Path) -> None:
    python = tmp_path / "python"
    program = 'case "$*" in --version) echo "Python 3.9.18";; *version_info*) exit 1;; esac'
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    done = _make("train", f"VENV={tmp_path}/venv", f"PYTHON={python}")
    assert done.returncode != 0
    text = f"needs Python 3.11 to 3.13, '{python}' is Python 3.9.18; name another one: make PYTHON=python3.12"
    assert text in done.stderr


def test_make_train_installs_what_draws_the_curve() -> None:
    done = _make("--dry-run", "train", "VENV=/nowhere")
    (extra,) = re.findall(r"install -e '\.\[(\w+)\]'", done.stdout)
    assert f'"{extra}": ["matplotlib>=' in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_the_tests_run_on_every_python_of_the_package() -> None:
    pythons = _yaml(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert pythons == re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', setup)


def test_pre_commit_has_the_ruff_that_is_pinned() -> None:
    (repo,) = _yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert f"\nruff=={repo['rev'].removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_the_citation_is_of_this_version() -> None:
    citation = _yaml(ROOT / "CITATION.cff")
    assert citation["version"] == fuselayers.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
