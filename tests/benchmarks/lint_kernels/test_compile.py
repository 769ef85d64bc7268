import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lint_kernels import compile as module
from benchmarks.lint_kernels.cases import launches_of
from benchmarks.lint_kernels.compile import CHIPS, check_compilers, compile_for, threads_of
from fuselayers.ops.implementations.launch import Launch
from fuselayers.partition import BackendUnavailableError
from tests.benchmarks.lint_kernels.kernels import GOOD, SPILLING, compiles

KERNEL = """
from fuselayers.ops.implementations.launch import kernel
from fuselayers.ops.implementations.triton_language import tl

@kernel
def my_kernel(x_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    tl.store(x_ptr + place, {result})
"""


@compiles
@pytest.mark.parametrize("arch", CHIPS)
def test_a_good_kernel(arch: str) -> None:
    (launch,) = launches_of(GOOD)
    code, shared = compile_for(launch, arch)
    # 16 elements of 16 bits for each of 128 threads, or 8 for each of 256.
    loads = {"gfx942": 1}.get(arch, 2)
    assert code.accesses() == {("load", 128): loads, ("store", 128): loads}
    assert (code.spills, shared) == (0, 0)
    assert 8 < code.registers < 128
    assert threads_of(launch, arch) == (256 if arch == "gfx942" else 128)


@compiles
def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    driver = module.triton.runtime.driver
    before = driver._active
    launch = launches_of(GOOD)[0]._replace(num_warps=2)
    compile_for(launch, "sm_90")
    assert list(tmp_path.iterdir()) == []
    assert driver._active is before


@compiles
def test_a_changed_kernel_is_compiled_anew(tmp_path: Path) -> None:
    counts = []
    for result in ("x + 1.0", "x * x + x * 3.0 + 1.0"):
        path = tmp_path / "changing.py"
        path.write_text(KERNEL.format(result=result))
        spec = importlib.util.spec_from_file_location("changing", path)
        assert spec is not None
        changing: Any = importlib.util.module_from_spec(spec)
        assert spec.loader is not None
        spec.loader.exec_module(changing)
        (launch,) = launches_of(SPILLING)
        code, _ = compile_for(Launch(changing.my_kernel, (1,), launch.arguments[:1], (4096,), 4), "sm_90")
        counts.append(code.instructions(1))
    assert counts[1] > counts[0]


@compiles
def test_without_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tools:
        ptxas = ptxas_blackwell = "there"

        @property
        def cuobjdump(self) -> str:
            raise RuntimeError("Cannot find cuobjdump")

    check_compilers()
    monkeypatch.setattr(module.triton.knobs, "nvidia", Tools())
    with pytest.raises(BackendUnavailableError, match=r"^Cannot find cuobjdump; it comes with Triton's wheel on PyPI"):
        check_compilers()
