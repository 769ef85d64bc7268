"""Regions at run time: the cache of definitions, and the fallback to torch when nvFuser fails."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import errors
from fuselayers.partition import FallbackWarning, fuse
from fuselayers.partition.compilers.nvfuser import definitions
from tests.partition.compilers.nvfuser.interpreter import StandIn
from tests.partition.compilers.nvfuser.tracing import region_of


def wave(x: Tensor) -> Tensor:
    return x.sin().cos() * 2


def fused(fn: Any = wave, **options: Any) -> Any:
    return fuse(fn, backend="nvfuser", fallback=(), **options)


class TestTheCache:
    def test_a_second_call_defines_nothing(self, on_the_cpu: StandIn) -> None:
        fn = fused()
        for _ in range(3):
            torch.testing.assert_close(fn(x := torch.randn(3, 4)), wave(x))
        assert (len(on_the_cpu.defined), on_the_cpu.executions) == (1, 3)

    def test_sizes_and_graphs_share_a_definition(self, on_the_cpu: StandIn) -> None:
        fused()(torch.randn(3, 4))
        fused(lambda y: wave(y))(torch.randn(5, 7))
        assert (len(on_the_cpu.defined), on_the_cpu.executions) == (1, 2)

    @pytest.mark.parametrize(
        "other",
        [
            torch.randn(4, 3).t(),
            torch.randn(3, 8)[:, ::2],
            torch.randn(1, 4),
            torch.randn(4).expand(3, 4),
            torch.randn(3, 4).double(),
            torch.randn(3, 4, 2),
        ],
        ids=["transposed", "strided", "size 1", "expanded", "dtype", "rank"],
    )
    def test_another_layout_has_a_definition_of_its_own(self, other: Tensor, on_the_cpu: StandIn) -> None:
        fn = fused()
        fn(torch.randn(3, 4))
        torch.testing.assert_close(fn(other), wave(other))
        assert len(on_the_cpu.defined) == 2

    def test_a_full_cache_is_emptied(self, on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(definitions, "CACHE_SIZE", 2)
        fn = fused()
        for x in (torch.randn(3, 4), torch.randn(1, 4), torch.randn(4, 3).t()):
            fn(x)
        assert len(definitions._definitions) == 1

    def test_a_dynamic_graph_needs_one_definition(self, on_the_cpu: StandIn) -> None:
        fn = fused(lambda x: (x.sin().reshape(x.shape[1], x.shape[0]) * 2).cos(), dynamic=True)
        for rows in (2, 5, 9):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(fn(x), (x.sin().reshape(x.shape[1], x.shape[0]) * 2).cos())
        assert (len(on_the_cpu.defined), on_the_cpu.executions) == (1, 3)
        assert "fd.define_scalar(None, DataType.Int)" in on_the_cpu.defined[0].script()

    def test_a_view_that_swaps_sizes_does_not_share_with_one_that_keeps_them(self, on_the_cpu: StandIn) -> None:
        """Two dynamic graphs that differ only in the order of the view's sizes."""

        def same(x: Tensor) -> Tensor:
            return (x * 2).exp().view(x.shape[0], x.shape[1]) * 3 + 1

        def turned(x: Tensor) -> Tensor:
            return (x * 2).exp().view(x.shape[1], x.shape[0]) * 3 + 1

        for fn in (same, turned):
            dynamic = fused(fn, dynamic=True)
            for shape in ((3, 5), (4, 6)):
                x = torch.randn(shape)
                torch.testing.assert_close(dynamic(x), fn(x))


def test_torch_runs_a_call_without_elements(on_the_cpu: StandIn) -> None:
    region = region_of(wave, torch.randn(3, 4))
    (result,) = region(torch.randn(0, 4))
    assert result.shape == (0, 4)
    region(torch.randn(3, 4))
    assert on_the_cpu.executions == 1


def test_only_one_thread_is_in_the_first_execution_of_a_definition(
    on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvFuser's first `execute` changes the definition in Python; a second thread would see it half changed."""
    in_first = threading.Event()
    others_came = threading.Event()

    class Changing(on_the_cpu.FusionDefinition):  # type: ignore[name-defined,misc]
        is_whole = True
        runs = False

        def execute(self, *args: Any, **kwargs: Any) -> Any:
            if not self.runs:
                assert self.is_whole, "another thread is changing this"
                self.is_whole = False
                in_first.set()
                others_came.wait(0.2)
                self.runs = True
            return super().execute(*args, **kwargs)

    monkeypatch.setattr(on_the_cpu, "FusionDefinition", Changing)
    first, second = (region_of(wave, torch.randn(3, 4)) for _ in range(2))
    x = torch.randn(3, 4)
    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(first, x)
        in_first.wait(5)
        late = threads.submit(second, x)
        late.add_done_callback(lambda _: others_came.set())
        for one in (early, late):
            torch.testing.assert_close(one.result()[0], wave(x))
    assert (len(on_the_cpu.defined), on_the_cpu.executions) == (1, 2)
    assert not first.failed
    assert not second.failed


class Broken(ModuleType):
    """An nvFuser that fails while a definition is made, or when it is executed."""

    def __init__(self, working: StandIn, *, fails: str, error: Exception | None = None) -> None:
        super().__init__("nvfuser_direct")
        self.DataType = working.DataType
        self.version = working.version

        class FusionDefinition(working.FusionDefinition):  # type: ignore[name-defined,misc]
            def define_tensor(self, *args: Any, **kwargs: Any) -> Any:
                if fails == "define":
                    raise RuntimeError("no such tensor\nand more")
                return super().define_tensor(*args, **kwargs)

            def execute(self, *args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("no scheduler can take this") if error is None else error

        self.FusionDefinition = FusionDefinition


@pytest.mark.parametrize(("fails", "said"), [("define", "no such tensor"), ("execute", "no scheduler can take this")])
def test_torch_runs_what_nvfuser_fails_on_with_one_warning(
    fails: str, said: str, on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvfuser_direct", Broken(on_the_cpu, fails=fails))
    monkeypatch.setattr(errors, "_said", set())
    fn = fused()
    x = torch.randn(3, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.warns(FallbackWarning) as caught:
            results = [fn(x) for _ in range(3)]
            results[0].sum().backward()
    texts = [str(one.message) for one in caught if one.category is FallbackWarning]
    reason = f"nvFuser failed on a part of a graph, which torch runs from now on: RuntimeError: {said}"
    assert texts == [reason]
    torch.testing.assert_close(results, [wave(x)] * 3)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, -2 * x.sin().sin() * x.cos())


@pytest.mark.parametrize(
    ("spoilt", "got"),
    [
        (Tensor.double, "torch.float64 [3, 4]"),
        (lambda one: one[:2], "torch.float32 [2, 4]"),
        (lambda one: one[None], "torch.float32 [1, 3, 4]"),
    ],
    ids=["dtype", "size", "rank"],
)
def test_a_result_of_the_wrong_dtype_or_shape_is_not_returned(
    spoilt: Callable[[Tensor], Tensor], got: str, on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spoilt(on_the_cpu.FusionDefinition):  # type: ignore[name-defined,misc]
        def execute(self, *args: Any, **kwargs: Any) -> list[Tensor]:
            return [spoilt(one) for one in super().execute(*args, **kwargs)]

    monkeypatch.setattr(on_the_cpu, "FusionDefinition", Spoilt)
    monkeypatch.setattr(errors, "_said", set())
    region = region_of(wave, x := torch.randn(3, 4))
    said = f"torch runs from now on: RuntimeError: wanted torch.float32 [3, 4] of nvFuser, got {got}"
    with pytest.warns(FallbackWarning, match=f"{re.escape(said)}$"):
        torch.testing.assert_close(region(x)[0], wave(x))
    assert region.failed


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUDA_ERROR_OUT_OF_MEMORY failed with error out of memory"),
    ],
    ids=["torch's own", "through the binding", "the run time's", "the driver's"],
)
def test_out_of_memory_is_raised_and_the_next_call_tries_again(
    error: Exception, on_the_cpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = region_of(wave, torch.randn(3, 4))
    broken = Broken(on_the_cpu, fails="execute", error=error)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "nvfuser_direct", broken)
        with pytest.raises(torch.OutOfMemoryError, match=f"^{re.escape(str(error))}$"):
            region(torch.randn(3, 4))
    definitions._definitions.clear()
    x = torch.randn(3, 4)
    torch.testing.assert_close(region(x)[0], wave(x))
    assert on_the_cpu.executions == 1
