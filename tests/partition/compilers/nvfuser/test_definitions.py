"""Regions at run time: which definitions are shared, and what happens when nvFuser fails."""

import re
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers import errors
from fuselayers.partition import FallbackWarning, fuse
from tests.partition.compilers.nvfuser.build_definitions import build
from tests.partition.compilers.nvfuser.interpreter import StandIn


def wave(x: Tensor) -> Tensor:
    return x.sin().cos() * 2


def fused(fn: Any = wave, **options: Any) -> Any:
    return fuse(fn, backend="nvfuser", fallback=(), **options)


def test_equal_layers_and_repeated_calls_share_their_definitions(on_the_cpu: StandIn) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)) for _ in range(6)]
    x, counts = torch.randn(3, 4), []
    for number in (3, 6):  # a first, a last and middle layers
        before, stack = len(on_the_cpu.defined), fused(nn.Sequential(*layers[:number]))
        for _ in range(2):
            stack(x).sum().backward()
        counts.append(len(on_the_cpu.defined) - before)
    assert 0 < counts[0] >= counts[1]


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(4, 3).t(),
        torch.randn(3, 8)[:, ::2],
        torch.randn(1, 4),
        torch.randn(4).expand(3, 4),
        torch.tensor(2.5),
    ],
    ids=["transposed", "strided", "size 1", "expanded", "rank"],
)
def test_any_layout_has_torchs_values_and_strides(other: Tensor, on_the_cpu: StandIn) -> None:
    fn = fused()
    fn(torch.randn(3, 4))
    got, expected = fn(other), wave(other)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()
    assert len(on_the_cpu.defined) == 2


def test_a_dynamic_graph_needs_one_definition(on_the_cpu: StandIn) -> None:
    fn = fused(dynamic=True)
    for rows in (2, 5, 9):
        torch.testing.assert_close(fn(x := torch.randn(rows, 4)), wave(x))
    assert (len(on_the_cpu.defined), on_the_cpu.executions) == (1, 3)


def test_a_script_makes_its_definition_again(on_the_cpu: StandIn) -> None:
    """`make test-nvfuser` builds these scripts with the real nvFuser."""
    fused(lambda x: (x.sin().transpose(0, 1) * float("inf"), x.unsqueeze(0).half().sum(1)))(torch.randn(3, 1))
    script = on_the_cpu.defined[-1].script()
    build(script, on_the_cpu)
    assert on_the_cpu.defined[-1].script() == script


def test_only_one_thread_is_in_the_first_execution_of_a_definition(
    on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvFuser's first `execute` changes the definition in Python; a second thread would see it half changed."""
    in_first, others_came = threading.Event(), threading.Event()

    class Changing(on_the_cpu.FusionDefinition):  # type: ignore[name-defined,misc]
        is_whole, runs = True, False

        def execute(self, *args: Any, **kwargs: Any) -> Any:
            if not self.runs:
                assert self.is_whole, "another thread is changing this"
                self.is_whole = False
                in_first.set()
                others_came.wait(0.2)
                self.runs = True
            return super().execute(*args, **kwargs)

    monkeypatch.setattr(on_the_cpu, "FusionDefinition", Changing)
    fn, x = fused(), torch.randn(3, 4)
    fn(torch.randn(4, 3).t())  # compiled, for another layout
    in_first.clear()
    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(fn, x)
        in_first.wait(5)
        late = threads.submit(fn, x)
        late.add_done_callback(lambda _: others_came.set())
        for future in (early, late):
            torch.testing.assert_close(future.result(), wave(x))
    assert (len(on_the_cpu.defined), on_the_cpu.executions) == (2, 3)


class Broken(ModuleType):
    """An nvFuser that fails while a definition is made, or when it is executed."""

    def __init__(self, working: StandIn, *, fails: str, error: Exception) -> None:
        super().__init__("nvfuser_direct")
        self.DataType = working.DataType

        class FusionDefinition(working.FusionDefinition):  # type: ignore[name-defined,misc]
            def define_tensor(self, *args: Any, **kwargs: Any) -> Any:
                if fails == "define":
                    raise error
                return super().define_tensor(*args, **kwargs)

            def execute(self, *args: Any, **kwargs: Any) -> Any:
                raise error

        self.FusionDefinition = FusionDefinition


@pytest.mark.parametrize("fails", ["define", "execute"])
def test_torch_runs_what_nvfuser_fails_on_with_one_warning(
    fails: str, on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(on_the_cpu, fails=fails, error=RuntimeError("no scheduler\nand more"))
    monkeypatch.setitem(sys.modules, "nvfuser_direct", broken)
    monkeypatch.setattr(errors, "_said", set())
    fn, x = fused(), torch.randn(3, 4, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [fn(x) for _ in range(3)]
        (gradient,) = torch.autograd.grad(results[0].sum(), x)
    assert [str(warning.message) for warning in caught if warning.category is FallbackWarning] == [
        "nvFuser failed on a part of a graph; torch runs this part from now on: RuntimeError: no scheduler"
    ]
    torch.testing.assert_close(results, [wave(x)] * 3)
    torch.testing.assert_close(gradient, -2 * x.sin().sin() * x.cos())


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried 2.00 GiB."), RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")],
    ids=["torch's own", "through the binding"],
)
def test_out_of_memory_is_raised_and_the_next_call_tries_again(
    error: Exception, on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, x = fused(), torch.randn(3, 4)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "nvfuser_direct", Broken(on_the_cpu, fails="define", error=error))
        with pytest.raises(torch.OutOfMemoryError, match=re.escape(str(error))):
            fn(x)
    torch.testing.assert_close(fn(x), wave(x))
    assert on_the_cpu.executions == 1
