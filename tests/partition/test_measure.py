import functools
import platform
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.partition import measure
from fuselayers.partition.measure import behind_guards, copies_of, seconds_of
from tests.processes import run


def test_the_slower_takes_longer_backward_included() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            time.sleep(0.01)
            return grad

    x = torch.ones(3, requires_grad=True)
    seconds = seconds_of({"eager": lambda x: (Slow.apply(x),), "unfused": lambda x: (x * 1,)}, [x], plain="unfused")
    assert seconds["eager"] > 0.01 > seconds["unfused"] > 0
    assert x.grad is None


def test_what_is_chosen_is_slower_in_neither_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of each are in proportion to the plain candidate's, by the worse of the two cases."""
    now, far = [0.0], []
    times = {"eager": (1.0, 0.7), "inductor": (0.8, 1.3), "unfused": (1.0, 1.0)}  # near, far

    class Elsewhere:
        def add_(self, _: float) -> None:
            far.append(True)

    def run(name: str, x: Tensor) -> Tensor:
        now[0] += times[name][bool(far)]
        far.clear()
        return x

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(measure, "torch", SimpleNamespace(**{**vars(torch), "zeros": lambda *_, **__: Elsewhere()}))
    seconds = seconds_of({name: functools.partial(run, name) for name in times}, [torch.ones(3)], plain="unfused")
    assert seconds == pytest.approx({"eager": 1.0, "inductor": 1.3, "unfused": 1.0})


def test_what_takes_long_is_not_called_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_TOO_MANY_SECONDS", 0.02)
    calls = {"eager": 0, "inductor": 0}

    def run(name: str, x: Tensor) -> Tensor:
        calls[name] += 1
        time.sleep(0.005)
        return x

    seconds_of({name: functools.partial(run, name) for name in calls}, [torch.ones(3)], plain="eager")
    assert set(calls.values()) == {1 + 4}


def test_guards_take_time_of_their_own() -> None:
    def run(x: Tensor) -> Tensor:
        return x

    x = torch.ones(3)
    assert behind_guards(run)(x) is x
    seconds = seconds_of({"eager": behind_guards(run), "unfused": run}, [x], plain="unfused")
    assert seconds["eager"] > seconds["unfused"]


def test_guards_are_left_out_where_nothing_may_be_compiled() -> None:
    torch.compiler.reset()
    with torch.compiler.set_stance("fail_on_recompile"):
        guarded = behind_guards(torch.neg)
        assert [guarded(torch.ones(1)).item() for _ in range(2)] == [-1.0] * 2


def test_an_input_that_is_given_back_has_no_backward() -> None:
    came = []
    x = torch.ones(3, requires_grad=True)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x.register_hook(came.append)
        return x * 2, x

    seconds_of({"eager": run}, [x], plain="eager")
    assert {tuple(gradient.tolist()) for gradient in came} == {(2.0, 2.0, 2.0)}


_MEMORY = """
import torch
from fuselayers.partition.measure import _memory_at_hand

def in_use():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

x = torch.ones(1 << 22)
before = in_use()
with _memory_at_hand([x]):
    print((in_use() - before) / x.nbytes)
print((in_use() - before) / x.nbytes)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory in their own way")
def test_candidates_find_memory_at_hand_which_is_given_back() -> None:
    # In a process of its own: what a test did before decides what glibc has.
    done = run(_MEMORY)
    assert done.errors == ""
    at_hand, left = map(float, done.printed.split())
    assert at_hand > 3.5
    assert left < 0.5


def test_memory_that_is_refused_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", refuse)
    x = torch.ones(1 << 16)
    assert seconds_of({"eager": torch.neg}, [x], plain="eager")["eager"] > 0


def test_autocast_keeps_no_copies_of_weights() -> None:
    kept = []

    def product(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        kept.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return (x @ weight,)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = [torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)]
        seconds_of({"eager": product}, given, plain="eager")
        assert torch.is_autocast_cache_enabled()
    assert set(kept) == {(True, False)}


def test_copies_share_memory_where_nobody_writes() -> None:
    x, written, whole = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), 7
    given, leaves = copies_of([x, written, whole], frozenset({1}))
    assert [one.data_ptr() == other.data_ptr() for one, other in zip(given[:2], (x, written), strict=True)] == [
        True,
        False,
    ]
    given[1].add_(1)
    assert written.tolist() == [1.0] * 3
    assert given[2] == whole
    assert [leaf.is_leaf and leaf.requires_grad for leaf in leaves] == [True, True]
    assert leaves[0] is not x
