import functools
import platform
import resource
import statistics
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.partition import measure
from fuselayers.partition.measure import behind_guards, copies_of, seconds_of


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


@pytest.mark.parametrize("worse", ["near", "far"])
def test_the_times_are_those_in_which_the_plain_candidate_does_better(
    worse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = []

    class Elsewhere:
        def add_(self, _: float) -> None:
            far.append(True)

    times = {"eager": 0.006, "inductor": 0.008}, {"eager": 0.02, "inductor": 0.002}

    def run(name: str, x: Tensor) -> Tensor:
        time.sleep(times[bool(far) == (worse == "near")][name])
        far.clear()
        return x

    monkeypatch.setattr(measure, "_ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(torch, "zeros", lambda *args, **options: Elsewhere())
    candidates = {name: functools.partial(run, name) for name in ("eager", "inductor")}
    seconds = seconds_of(candidates, [torch.ones(3)], plain="eager")
    assert 0.006 < seconds["eager"] < 0.008 < seconds["inductor"] < 0.012


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
    assert 2e-6 < seconds["eager"] - seconds["unfused"] < 2e-3


def test_an_input_that_is_given_back_has_no_backward() -> None:
    came = []
    x = torch.ones(3, requires_grad=True)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x.register_hook(came.append)
        return x * 2, x

    seconds_of({"eager": run}, [x], plain="eager")
    assert {tuple(gradient.tolist()) for gradient in came} == {(2.0, 2.0, 2.0)}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory in their own way")
def test_no_candidate_pays_for_pages_of_memory() -> None:
    faults: dict[str, list[int]] = {"eager": [], "unfused": []}

    def run(name: str, *given: Tensor) -> Tensor:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        results = [one + 1 for one in given * 3]  # more than glibc keeps, once it is free
        faults[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return results[0]

    x = torch.ones(1 << 22)
    seconds_of({name: functools.partial(run, name) for name in faults}, [x, x.clone()], plain="eager")
    pages = 6 * x.nbytes // resource.getpagesize()
    assert all(statistics.median(counts) < pages / 100 for counts in faults.values())


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
