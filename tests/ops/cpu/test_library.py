import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import fuselayers
from fuselayers import ops
from fuselayers.ops.cpu import has_kernels
from fuselayers.ops.implementations.launch import INTERPRETED
from tests.ops.contract import seed_of, tensors

ROOT = Path(fuselayers.__file__).parents[1]

pytestmark = pytest.mark.skipif(INTERPRETED or not has_kernels(), reason="no kernels in C++ here")


def ran(code: str, *arguments: str, folder: Path = ROOT, **environment: str) -> str:
    """The output of a new process, since a process chooses its library once."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def results(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Values and gradients of every family of kernels."""
    inputs = [tensor.requires_grad_() for tensor in (x, residual, bias, weight)]
    seed, target = seed_of(), torch.arange(len(x)) % x.shape[-1]
    outputs = [
        ops.bias_activation_dropout(x, bias, activation="gelu", p=0.3, seed=seed, backend="cpp"),
        *ops.bias_dropout_residual_layer_norm(
            x, residual, weight=weight, norm_bias=bias, bias=bias, p=0.3, seed=seed, style="prenorm", backend="cpp"
        ),
        ops.gated_activation(x, residual, backend="cpp"),
        ops.cross_entropy(x, target, label_smoothing=0.1, z_loss=1e-4, backend="cpp"),
        *ops.rotary(
            x, residual, weight[: x.shape[-1] // 2].expand(len(x), -1), bias[::2].expand(len(x), -1), backend="cpp"
        ),
        ops.attention(
            *(part.unflatten(1, (2, -1)).transpose(0, 1)[None] for part in (x, residual, x)),
            **{"causal": True, "soft_cap": 9.0, "sinks": weight[:2], "bias": bias[: len(x)], "p": 0.3, "seed": seed},
            backend="cpp",
        ),
    ]
    gradients = torch.autograd.grad(sum((output.float() ** 2).sum() for output in outputs), inputs)
    return [*outputs, *gradients]


def test_numbers_do_not_depend_on_the_number_of_threads() -> None:
    inputs = tensors((300, 514), (300, 514), (514,), (514,))
    before = torch.get_num_threads()
    try:
        by_threads = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            by_threads.append(results(*(tensor.clone() for tensor in inputs)))
    finally:
        torch.set_num_threads(before)
    for others in by_threads[1:]:
        for got, expected in zip(others, by_threads[0], strict=True):
            assert torch.equal(got, expected)


EVERY_FAMILY = """
import torch
from tests.ops.cpu.test_library import results
from tests.ops.contract import tensors

torch.save([tensor.detach() for tensor in results(*tensors((33, 130), (33, 130), (130,), (130,)))], sys.argv[1])
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.parametrize("capability", ["AVX2", pytest.param("DEFAULT", marks=pytest.mark.slow)])
def test_every_instruction_set_has_the_same_numbers(capability: str, tmp_path: Path) -> None:
    """Equal up to rounding. The tests of philox compare the masks bitwise on each instruction set."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2"):
        pytest.skip("this machine has neither AVX2 nor AVX-512")
    path = tmp_path / "results.pt"
    printed = ran("import sys\n" + EVERY_FAMILY, str(path), ATEN_CPU_CAPABILITY=capability.lower())
    assert printed == f"{capability}\n"
    for got, expected in zip(torch.load(path), results(*tensors((33, 130), (33, 130), (130,), (130,))), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_in_a_new_process() -> None:
    """A process loads one OpenMP and imports no compiler, and kernels run in forked workers of a data loader."""
    libraries, imported, same = ran(
        """
import sys
import torch
from fuselayers import ops

x = torch.randn(300, 300, requires_grad=True)
ops.bias_activation_dropout(x, torch.zeros(300), activation="gelu", p=0.1).sum().backward()
ops.layer_norm(x, weight=torch.ones(300)).sum().backward()
print(sorted({line.split("/")[-1].strip() for line in open("/proc/self/maps") if "gomp" in line or "libomp" in line}))
print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "networkx", "hydra") if name in sys.modules])

class Steps(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return ops.dropout(torch.ones(512, 256), 0.5, seed=torch.tensor(index))

expected = [Steps()[index] for index in range(2)]
loaded = torch.utils.data.DataLoader(Steps(), batch_size=None, num_workers=1, multiprocessing_context="fork")
print(all(map(torch.equal, loaded, expected)))
"""
    ).splitlines()
    assert len(json.loads(libraries.replace("'", '"'))) == 1
    assert (imported, same) == ("[]", "True")


MISSING = """
import warnings
import torch
import fuselayers
from fuselayers import ops

x = torch.ones(2, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    results = [ops.dropout(x, 0.5, seed=torch.tensor(7)) for _ in range(2)]
assert torch.equal(results[0], 2 * ops.keep_mask(torch.tensor(7), (2, 8), p=0.5))
print(fuselayers.__file__, *(f"{warning.category.__name__}: {warning.message}" for warning in caught), sep="\\n")
"""


HAS_AVX = pytest.mark.skipif("AVX" not in torch.backends.cpu.get_cpu_capability(), reason="takes the plain library")


# Each copies the package and imports it in a new process.
@pytest.mark.parametrize(
    "fault",
    [
        "not built",
        pytest.param("built from other sources", marks=pytest.mark.slow),
        pytest.param("damaged", marks=[HAS_AVX, pytest.mark.slow]),
    ],
)
def test_without_a_library_the_formula_serves_and_it_is_said_once(fault: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fuselayers", tmp_path / "fuselayers", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "fuselayers" / "ops" / "cpu"
    if fault == "not built":
        for path in folder.glob("*.so"):
            path.unlink()
    elif fault == "damaged":
        for path in folder.glob("_avx*.so"):
            path.write_bytes(b"")
    else:
        with (folder / "math.h").open("a") as file:
            file.write("// changed\n")
    imported, warning = ran(MISSING, folder=tmp_path, PYTHONPATH=str(tmp_path)).splitlines()
    assert imported.startswith(str(tmp_path))
    says = {
        "not built": "in plain torch: no library was built; ",
        "built from other sources": r"in plain torch: _plain\.\S+ was built from other C\+\+ sources; ",
        "damaged": r"without AVX\d+: .*: file too short; ",
    }
    assert re.match(
        rf"FallbackWarning: the ops run slower on this CPU, {says[fault]}install a C\+\+ compiler ", warning
    )
    assert warning.endswith(": pip install --force-reinstall --no-deps --no-cache-dir")


def wheel_of(folder: Path, **environment: str) -> list[str]:
    """Build the package from a copy whose path has a space; return the names of the wheel and of its files."""
    source = folder / "a copy"
    kept = shutil.ignore_patterns("*.so", "__pycache__", ".*", "build", "*.egg-info", "tests", "docs", "plots", "runs")
    shutil.copytree(ROOT, source, ignore=kept)
    done: Any = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "-j", "3", "bdist_wheel", "--dist-dir", str(folder / "dist")],
        cwd=source,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").iterdir()
    return [wheel.name, *zipfile.ZipFile(wheel).namelist()]


@pytest.mark.slow
def test_a_wheel_serves_every_python(tmp_path: Path) -> None:
    name, *files = wheel_of(tmp_path)
    assert "-cp311-abi3-linux_" in name
    libraries = [file for file in files if file.endswith(".so")]
    assert "fuselayers/ops/cpu/_plain.abi3.so" in libraries
    assert {"fuselayers/ops/cpu/math.h", "fuselayers/ops/cpu/elementwise.cpp"} <= set(files)  # to compute their hash


@pytest.mark.slow
def test_it_installs_without_a_compiler(tmp_path: Path) -> None:
    _, *files = wheel_of(tmp_path, CC="/nowhere/gcc", CXX="/nowhere/g++")
    assert not [file for file in files if file.endswith(".so")]
