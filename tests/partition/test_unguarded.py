"""Calls past Dynamo's guards: when a function itself is called, and when it must not be."""

import random
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from fuselayers.partition import (
    aot_function,
    auto,
    fuse,
    unguarded,
)
from fuselayers.partition.unguarded import glance
from tests.partition.measured import check, inputs, wave

pytestmark = pytest.mark.usefixtures("own_memory", "inductor_or_its_place")


def test_the_function_itself_is_called_when_nothing_in_it_is_fused(measured: Any) -> None:
    calls = []

    def spoken(a: Tensor, b: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            calls.append(1)
        return (a + b).cos()

    measured("unfused")
    fused = fuse(spoken)
    for _ in range(4):
        fused(*inputs())
    assert len(calls) == 2  # the first call measured, the second found out
    with torch.no_grad():
        fused(*inputs())
    assert len(calls) == 2  # which is another graph


def test_of_lists_and_objects_too(measured: Any) -> None:
    class Scaled:
        def __init__(self, by: float) -> None:
            self.by = by

        @fuse
        def of(self, pair: list[Tensor], more: dict[str, Tensor]) -> Tensor:
            return (pair[0] + more["b"]).cos() * self.by

    def call(scaled: Scaled, size: int = 12) -> int:
        """How many runs went through the guards."""
        runs = Scaled.of._runs
        before = runs.unfused + runs.fused
        a, b = inputs(size)
        torch.testing.assert_close(scaled.of([a], {"b": b}), (a + b).cos() * scaled.by)
        return int(runs.unfused + runs.fused - before)

    measured("unfused")
    one, another = Scaled(2.0), Scaled(2.0)
    for scaled in (one, another):
        for _ in range(3):
            call(scaled)
    assert [call(scaled) for scaled in (one, another) for _ in range(3)] == [0] * 6
    with torch.no_grad():
        assert call(one) > 0


def test_what_is_fused_within_it_stays_out_of_it(measured: Any) -> None:
    """As in the graph that was measured, where it was traced as if it had never been fused."""
    seen = []

    def compiler(graph: Any, given: Any) -> Any:
        seen.append(graph)
        return graph

    inner = aot_function(lambda x: x.sin(), compiler)
    measured("unfused")
    fused = fuse(lambda x: inner(x * 2) * 3)
    x = torch.randn(4, requires_grad=True)
    for _ in range(4):
        torch.testing.assert_close(fused(x), (x * 2).sin() * 3)
    assert seen == []
    inner(x)
    assert seen


def test_a_checkpoint_never_takes_one_way_and_then_the_other(measured: Any) -> None:
    inner = fuse(lambda z: z.sqrt() * 1, backend="inductor")

    def outer(q: Tensor) -> Tensor:
        return inner(q * 2) * 3

    measured("unfused")
    x = torch.rand(16, requires_grad=True) + 0.1
    fuse(outer)(x)
    with torch.no_grad():
        fuse(outer)(x)
    torch.compiler.reset()
    fused = fuse(outer)  # decided by what is remembered
    with torch.no_grad():
        for _ in range(3):
            fused(x)
    for _ in range(3):
        leaf = x.detach().requires_grad_()
        checkpoint(fused, leaf, use_reentrant=False).sum().backward()
        expected = torch.autograd.grad((leaf * 2).sqrt().sum() * 3, leaf)[0]
        torch.testing.assert_close(leaf.grad, expected)


def test_a_checkpoint_within_it_runs_the_same_again(measured: Any) -> None:
    """Its forward within the call, and again in backward, when the call is over."""

    def two(z: Tensor) -> Tensor:
        return z.sqrt() * z.cos()

    inner = fuse(two, backend="inductor")

    def outer(q: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(inner, q * 2, use_reentrant=False)) * 3

    measured("unfused")
    fused = fuse(outer)
    for _ in range(5):
        x = (torch.rand(16) + 0.1).requires_grad_()
        fused(x).sum().backward()
        expected = torch.autograd.grad((two(x * 2) * 3).sum(), x)[0]
        torch.testing.assert_close(x.grad, expected)
    assert fused.served_by == ("inductor",)  # the plain graph would not do what is checkpointed again


def test_a_reentrant_checkpoint_draws_the_same_mask_again(measured: Any) -> None:
    """Its forward has no gradients and no hooks, as a validation has that went before."""
    measured("unfused")
    module = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    fused = fuse(module)
    module.eval()
    with torch.no_grad():
        for _ in range(6):
            fused(torch.randn(64))
    module.train()
    for _ in range(3):
        x = torch.rand(64, requires_grad=True)
        y = checkpoint(fused, x, use_reentrant=True)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad == 0, y == 0)


def test_a_reentrant_checkpoint_within_it_draws_the_same_mask_again(measured: Any) -> None:
    inner = fuse(nn.Dropout(0.5), backend="inductor")

    @torch.compiler.disable
    def helper(x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(inner, x, use_reentrant=True))

    measured("unfused")
    fused = fuse(lambda x: helper(x * 1.5) * 3)
    for _ in range(5):
        x = torch.rand(64, requires_grad=True)
        y = fused(x)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad == 0, y == 0)


def test_without_gradients_a_checkpoint_draws_the_same_mask_again(measured: Any) -> None:
    """Though there is nothing to save, and though there is another graph between forward and backward."""
    measured("unfused")
    module = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    fused = fuse(module)
    drawn = []

    def taught(x: Tensor) -> Tensor:
        with torch.no_grad():
            drawn.append(fused(torch.ones(64)))
        return fused(x) * drawn[-1]

    module.eval()
    with torch.no_grad():
        for _ in range(4):
            fused(torch.ones(64))
    module.train()
    assert fused.fused._calls_without_a_look > 0
    for _ in range(3):
        checkpoint(taught, torch.rand(64, requires_grad=True), use_reentrant=False).sum().backward()
        assert torch.equal(drawn[-2], drawn[-1])


def test_what_is_fused_within_it_is_found_on_its_own_short_way(measured: Any) -> None:
    measured("unfused")
    inner = fuse(lambda x: x.sin() * 2)
    x = torch.randn(4)
    for _ in range(7):
        inner(x)
    assert inner._calls_without_a_look
    outer = fuse(lambda x: inner(x) + 1)
    for _ in range(5):
        outer(x)
    assert outer._has_fused_parts
    graphs = len(inner.report().graphs)
    outer(torch.randn(5))
    for _ in range(5):
        outer(torch.randn(5))
    assert len(inner.report().graphs) == graphs


def test_a_shape_that_comes_in_step_is_seen(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unguarded, "_CALLS_WITHOUT_GUARDS", 100_000)
    monkeypatch.setattr(unguarded, "_order", random.Random(0))  # whatever ran before
    measured("unfused")
    fused = fuse(wave, dynamic=False)
    for _ in range(5):
        fused(*inputs())
    for call in range(4000):
        fused(*inputs(8 if call % 16 == 7 else 12))
    assert len(fused.report().graphs) == 2


def test_where_nothing_is_fused_most_calls_are_not_even_looked_at(
    measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def counted(*args: Any) -> Any:
        looks.append(args)
        return glance(*args)

    monkeypatch.setattr(unguarded, "glance", counted)
    measured("unfused")
    fused = fuse(wave)
    for _ in range(500):
        fused(*inputs())
    assert 10 <= len(looks) < 25
    looks.clear()
    for _ in range(100):  # another shape is found, and decided
        check(fused, *inputs(8))
    assert looks
    assert len(fused.report().graphs) == 2


def test_after_few_calls_few_go_without_a_look(measured: Any) -> None:
    measured("unfused")
    fused = fuse(wave)
    for _ in range(10):
        fused(*inputs())
    for _ in range(8):
        fused(*inputs(1000))
    assert len(fused.report().graphs) == 2


def test_its_own_attributes_are_none_that_a_wrapper_copies() -> None:
    class Bare(unguarded.UnguardedCalls):
        pass

    assert vars(Bare(wave)) == {}


def test_in_inference_mode_every_call_is_looked_at_and_few_by_the_guards(measured: Any) -> None:
    measured("unfused")
    fused = fuse(wave)
    with torch.inference_mode():
        for _ in range(100):
            fused(torch.ones(12), torch.ones(12))
    assert fused._calls_without_a_look == 0
    assert fused._runs.unfused < 5


def test_where_something_is_fused_every_call_is_looked_at(measured: Any) -> None:
    clock = measured("unfused")
    fused = fuse(wave)
    with torch.no_grad():
        fused(*inputs())
    clock.fastest = "inductor"
    fused(*inputs())
    runs = fused._runs
    for _ in range(20):
        with torch.no_grad():
            fused(*inputs())
        before = runs.fused
        fused(*inputs())
        assert runs.fused == before + 1


def test_now_and_then_the_guards_have_a_look(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unguarded, "_CALLS_WITHOUT_GUARDS", 3)
    clock = measured("unfused")

    class Deepens(nn.Module):
        deep = False

        def forward(self, x: Tensor) -> Tensor:
            return x.cos().cos() if self.deep else x.cos()

    part = Deepens()
    fused, x = fuse(part), torch.randn(3)
    for _ in range(3):
        fused(x)
    part.deep = True
    for _ in range(6):
        torch.testing.assert_close(fused(x), x.cos().cos())
    assert len(clock.asked) == 2


def test_a_part_that_is_not_measured_counts_as_fused(measured: Any) -> None:
    def mixed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        c = a.cos()
        torch._dynamo.graph_break()
        return c, b.cos()

    measured("unfused")
    fused = fuse(mixed)
    for _ in range(3):
        fused(torch.ones(2), TwoTensor(torch.ones(2), torch.ones(2)))
    assert not fused._as_it_is


def test_a_graph_break_between_fused_and_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["unfused", "inductor"])

    def clock(candidates: Any, inputs: Any, **_: Any) -> dict[str, float]:
        fastest = next(answers)
        return {name: 1.0 if name == fastest else 2.0 for name in candidates}

    monkeypatch.setattr(auto, "seconds_of", clock)

    def broken(a: Tensor, b: Tensor) -> Tensor:
        c = a + b
        torch._dynamo.graph_break()
        return c.cos()

    fused = fuse(broken)
    for _ in range(4):
        check(fused, *inputs())
    assert fused.served_by == ("unfused", "inductor")
    assert not fused._as_it_is


def test_a_reentrant_checkpoint_draws_the_same_mask_again_after_a_change(measured: Any) -> None:
    """What the module's parts are like does not show at a glance: the run in backward asks the guards as well."""
    measured("unfused")

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.drop(x) * 1.5)

    module = Dropping()
    fused = fuse(module)
    for p in (0.0,) * 6 + (0.5,) * 6 + (0.0, 0.5):
        module.drop.p = p
        x = torch.rand(64, requires_grad=True)
        y = checkpoint(fused, x, use_reentrant=True)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad == 0, y == 0)
        assert bool((y == 0).any()) is (p > 0)
