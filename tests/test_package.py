"""The package as a whole: its wheel and sdist, the direction of its imports, and the agreement of its files."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from email.message import Message
from email.parser import Parser
from importlib.util import resolve_name
from pathlib import Path

import pytest

import fuselayers
from fuselayers.figure import new_figure

ROOT = Path(__file__).parents[1]
# From the lowest layer to the highest; a layer imports only lower ones. __init__ and __main__ of the package come last.
LAYERS = ("_torch", "ops", "partition", "components", "configs", "cli", "testing")
# Import names that differ from the name of the package that provides them.
PACKAGE_OF = {"hydra": "hydra-core", "omegaconf": "hydra-core", "yaml": "hydra-core", "typing_extensions": "torch"}


def _modules(package: Path) -> dict[str, Path]:
    """Map the dotted name of every module in a package folder to its file; a folder's name stands for its __init__."""
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """The imports and the calls of a file."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]


def _package_of(name: str, path: Path) -> list[str]:
    return name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]


def _statements(name: str, path: Path, modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of each module that the import statements of a file name."""
    package = _package_of(name, path)
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in modules else base


def _calls(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of each module that `importlib` or `__import__` imports by a literal name."""
    for node in _nodes(path):
        called = getattr(node, "func", None)
        if getattr(called, "attr", getattr(called, "id", "")) in ("import_module", "__import__"):
            assert isinstance(node, ast.Call)
            for wanted in node.args[:1]:
                if isinstance(wanted, ast.Constant) and isinstance(wanted.value, str):
                    yield node.lineno, resolve_name(wanted.value, ".".join(_package_of(name, path)))


def _imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    yield from _statements(name, path, modules)
    yield from _calls(name, path)


def _height(name: str) -> int:
    parts = name.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return len(LAYERS)
    return LAYERS.index(parts[1]) if parts[1] in LAYERS else -1


def _upward_imports(package: Path) -> list[str]:
    modules = _modules(package)
    return [
        f"{path.relative_to(package.parent)}:{line}: {name} imports {target}, which stands above it"
        for name, path in modules.items()
        for line, target in _imports(name, path, modules)
        if target in modules and _height(target) > _height(name)
    ]


def _circle(package: Path) -> list[str]:
    modules = _modules(package)
    graph = {
        name: {target for _, target in _imports(name, path, modules) if target in modules and target != name}
        for name, path in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_imports_run_one_way() -> None:
    assert _upward_imports(ROOT / "fuselayers") == []


def test_the_package_offers_its_names_before_they_are_imported() -> None:
    program = """
import sys, fuselayers
assert dir(fuselayers) == sorted(fuselayers.__all__)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    names: dict[str, object] = {}
    exec("from fuselayers import *", names)
    assert names["fuse"] is fuselayers.partition.fuse
    assert names["ops"] is sys.modules["fuselayers.ops"]
    with pytest.raises(AttributeError, match="module 'fuselayers' has no attribute 'nothing'"):
        fuselayers.nothing  # noqa: B018


def test_ops_and_partition_import_no_package_that_prints_composes_or_draws() -> None:
    program = """
import sys
import fuselayers.ops, fuselayers.partition
heavy = {"rich", "hydra", "omegaconf", "yaml", "matplotlib", "networkx"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^a picture needs matplotlib; install it with: pip install matplotlib$"):
        new_figure()


def test_imports_make_no_circle() -> None:
    assert _circle(ROOT / "fuselayers") == []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, built from a copy, since a build leaves files in its tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("fuselayers", "tests", "docs", "plots"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    # This compiler writes empty files. The installation compiles the C++ itself.
    compiler = tree / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: >"$2"\n')
    compiler.chmod(0o755)
    build = "from setuptools import build_meta as b; b.build_wheel('built'); b.build_sdist('built')"
    done = subprocess.run(
        [sys.executable, "-c", build],
        cwd=tree,
        env=os.environ | dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), str(compiler)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "built"


def _wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def _metadata(built: Path) -> Message:
    wheel = _wheel(built)
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def _package_files() -> set[str]:
    kept = {".py", ".cpp", ".h", ".yaml", ".json"}
    paths = (path for path in (ROOT / "fuselayers").rglob("*") if path.suffix in kept or path.name == "py.typed")
    return {str(path.relative_to(ROOT)) for path in paths}


def test_the_wheel_holds_the_package_its_config_files_and_nothing_else(built: Path) -> None:
    files = {name for name in _wheel(built).namelist() if ".dist-info/" not in name}
    libraries = {name for name in files if name.endswith(".so")}
    assert files - libraries == _package_files()
    assert "fuselayers/ops/cpu/_plain.abi3.so" in libraries
    assert {Path(name).parent.as_posix() for name in libraries} == {"fuselayers/ops/cpu"}
    assert "fuselayers/configs/groups/model/gpt_nano.yaml" in files
    assert "fuselayers/py.typed" in files


def test_the_sdist_holds_what_its_tests_need(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        files = {name.partition("/")[2] for name in sdist.getnames()}
    assert _package_files() - files == set()
    wanted = {"setup.py", "pyproject.toml", "constraints.txt", "Makefile", "docs/conf.py", "LICENSE", "README.md"}
    assert wanted | {"CHANGELOG.md", "docs/index.md", "tests/test_package.py", "plots/README.md"} <= files


def test_versions_agree(built: Path) -> None:
    newest = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == fuselayers.__version__ == _metadata(built)["Version"]


def test_a_torch_that_is_installed_already_may_stay(built: Path) -> None:
    requirements = _metadata(built).get_all("Requires-Dist", [])
    assert "torch>=2.12" in requirements
    assert [line for line in requirements if "==" in line.partition(";")[0]] == []


def _requirements(built: Path, *, extras: Sequence[str]) -> set[str]:
    lines = _metadata(built).get_all("Requires-Dist", [])
    asked = [line for line in lines if "extra ==" not in line or re.findall(r'extra == "(\w+)"', line)[0] in extras]
    return {_canonical(re.split(r"[<>=!~;\[ ]", line)[0]) for line in asked}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_that_is_imported_is_required(built: Path) -> None:
    modules = _modules(ROOT / "fuselayers")
    # Not the imports by `importlib`: those packages need not be installed.
    imported = {
        target.split(".")[0] for name, path in modules.items() for _, target in _statements(name, path, modules)
    }
    foreign = imported - {"fuselayers"} - set(sys.stdlib_module_names)
    # Triton is imported by Inductor's code for a GPU.
    needed = {_canonical(PACKAGE_OF.get(name, name)) for name in foreign} | {"triton"}
    assert needed == _requirements(built, extras=["hub", "plots"])


def test_every_requirement_is_pinned_to_one_version(built: Path) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if len(pin) != 2] == []
    names = [_canonical(name) for name, _ in pins]
    assert len(names) == len(set(names))
    assert _requirements(built, extras=["hub", "plots", "test", "timm", "docs"]) - set(names) == set()
