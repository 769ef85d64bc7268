from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import counters

from fuselayers import ops
from fuselayers.partition import FallbackWarning, fuse

pytestmark = pytest.mark.slow  # they compile


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def gradients(fn: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.autograd.grad(fn(*inputs).square().sum(), inputs)


@pytest.mark.parametrize("threads", [1, 2])
def test_forward_and_backward_are_a_file_each(cache: Path, threads: int) -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return ((x.sin() @ weight).cos() @ weight).exp()  # kernels between the products

    inputs = [torch.randn(65, 65, requires_grad=True) * 0.1 for _ in range(2)]
    with torch._inductor.config.patch(compile_threads=threads):
        got = gradients(fuse(layer, backend="inductor", fallback=()), *inputs)
    torch.testing.assert_close(got, gradients(layer, *inputs))
    assert len(list(cache.glob("*/*.main.cpp"))) == 2


def test_a_compiler_that_fails_is_known_before_the_first_step(cache: Path) -> None:
    compiler = cache / "g++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) exec g++ --version;; esac\nexit 1\n')
    compiler.chmod(0o755)
    fused = fuse(lambda x: x.sin() * 3, backend="inductor", fallback=("eager",))
    with (
        torch._inductor.config.patch({"cpp.cxx": (str(compiler),)}),
        pytest.warns(
            FallbackWarning, match=r"^backend 'inductor' is not used: CppCompileError: .*'eager' is used instead"
        ),
    ):
        fused(torch.ones(3))
    assert fused.served_by == ("eager",)


def test_code_of_an_op_with_another_constant_is_not_found_in_the_cache() -> None:
    """The ops have custom backwards, which torch caches only if told to."""
    x = torch.randn(8, 32, requires_grad=True)
    counters.clear()
    for p in (0.1, 0.5, 0.5):
        torch.compiler.reset()
        got = gradients(fuse(lambda x, p=p: ops.dropout(x.sin(), p), backend="inductor", fallback=()), x)
        torch.testing.assert_close(got, gradients(lambda x, p=p: ops.dropout(x.sin(), p), x))
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
