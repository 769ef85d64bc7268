import copy
import functools
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers import ops
from fuselayers.partition import (
    CostModel,
    PartitionError,
    budget,
    default,
    explain,
    fuse,
    machine_of,
    min_cut,
    saved_bytes,
)
from fuselayers.partition.joint_graph import JointGraph
from fuselayers.partition.partitioners import SavePolicy
from fuselayers.partition.saved_by_budget import smallest_saved_bytes
from tests.partition.tracing import GPT, Traced, recomputed_flops, torchs_choice


@functools.cache
def gpt() -> tuple[Traced, JointGraph]:
    graph = GPT.decomposed(layers=2)
    return graph, graph.joint()


def least_of(joint: JointGraph) -> int:
    return smallest_saved_bytes(joint, cost=CostModel(machine_of("cpu")))


def bytes_of(rule: SavePolicy, joint: JointGraph) -> int:
    return joint.saved_bytes(rule.saved_values(joint, fused=True))


class TestOnAModel:
    # A tight share, one in the middle and a loose one: torch chooses other values at each.
    @pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
    def test_no_more_flops_again_than_torch_at_as_many_bytes(self, share: float) -> None:
        graph, joint = gpt()
        theirs, saved = torchs_choice(graph, share)
        limit = theirs.saved_bytes(saved) + 1024
        ours = budget(limit).saved_values(joint, fused=True)
        assert joint.saved_bytes(ours) <= limit
        assert recomputed_flops(joint, ours) <= recomputed_flops(theirs, saved)

    def test_fits_every_limit_and_more_bytes_never_cost_more_flops(self) -> None:
        _, joint = gpt()
        low, high = least_of(joint), bytes_of(min_cut, joint)
        assert low < 0.1 * high
        flops = []
        for step in range(5):
            limit = low + (high - low) * step // 4
            saved = budget(limit).saved_values(joint, fused=True)
            assert joint.saved_bytes(saved) <= limit
            flops.append(recomputed_flops(joint, saved))
        assert flops == sorted(flops, reverse=True)
        assert flops[0] > 0
        assert flops[-1] == 0

    def test_with_room_enough_it_is_the_minimum_cut(self) -> None:
        _, joint = gpt()
        for fused in (True, False):
            high = joint.saved_bytes(min_cut.saved_values(joint, fused=fused))
            assert budget(high).saved_values(joint, fused=fused) == min_cut.saved_values(joint, fused=fused)
            assert budget(1 << 60).saved_values(joint, fused=fused) == min_cut.saved_values(joint, fused=fused)

    @pytest.mark.parametrize("fused", [True, False])
    def test_a_share_is_of_what_the_default_saves(self, fused: bool) -> None:
        _, joint = gpt()
        whole = joint.saved_bytes(default.saved_values(joint, fused=fused))
        for share in (0.1, 0.35, 0.5, 1.0):
            saved = joint.saved_bytes(budget(share).saved_values(joint, fused=fused))
            assert saved <= share * whole
            assert saved == joint.saved_bytes(budget(int(share * whole)).saved_values(joint, fused=fused))

    def test_too_small_says_how_little_will_do(self) -> None:
        _, joint = gpt()
        least = least_of(joint)
        text = (
            rf"^this graph cannot do with {least - 1:,} bytes saved for backward: the smallest cut found saves "
            rf"{least:,}; give a larger budget, or fuse a smaller part of the model$"
        )
        with pytest.raises(PartitionError, match=text):
            budget(least - 1).saved_values(joint, fused=True)
        assert bytes_of(budget(least), joint) == least


@pytest.mark.parametrize(
    ("limit", "error", "text"),
    [
        (0, ValueError, r"^a budget in bytes must be above 0, got 0$"),
        (-5, ValueError, r"^a budget in bytes must be above 0, got -5$"),
        (
            0.0,
            ValueError,
            r"^a budget given as a float is a share, 0 < share <= 1, got 0\.0; give bytes as an int$",
        ),
        (1.5, ValueError, r"^a budget given as a float is a share, 0 < share <= 1, got 1\.5; give bytes as an int$"),
        (1e6, ValueError, r"^a budget given as a float is a share, .* got 1000000\.0; give bytes as an int$"),
        (float("nan"), ValueError, r"^a budget given as a float is a share, .* got nan; give bytes as an int$"),
        (True, TypeError, r"^a budget is an int \(bytes\) or a float \(a share of what 'default' saves\), got True$"),
        (
            "1 GB",
            TypeError,
            r"^a budget is an int \(bytes\) or a float \(a share of what 'default' saves\), got '1 GB'$",
        ),
        (None, TypeError, r"^a budget is an int \(bytes\) or a float \(a share of what 'default' saves\), got None$"),
    ],
)
def test_limits_that_are_none(limit: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        budget(limit)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = ops.dropout(layer(x).sin().exp(), 0.1) + x
        return x


class TestThroughFuse:
    @pytest.mark.parametrize(
        ("backend", "share"),
        [("eager", 0.6), ("eager", 0.3), pytest.param("inductor", 0.3, marks=pytest.mark.slow)],
    )
    def test_values_gradients_and_bytes(self, backend: str, share: float) -> None:
        stack, x = Stack(), torch.randn(128, 64, requires_grad=True)
        whole = saved_bytes(fuse(stack, backend="eager", partition="default"), x)
        twin = copy.deepcopy(stack)
        fused = fuse(twin, backend=backend, partition=budget(share))
        results = []
        for model in (stack, fused):
            torch.manual_seed(1)
            out = model(x)
            results.append((out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
        assert saved_bytes(fused, x) <= share * whole

    def test_the_least_that_an_error_names_will_do(self) -> None:
        x = torch.randn(128, 64, requires_grad=True)
        with pytest.raises(PartitionError) as error:
            fuse(Stack(), backend="eager", partition=budget(100))(x)
        named = re.search(r"saves ([\d,]+);", str(error.value))
        assert named
        least = int(named[1].replace(",", ""))
        assert saved_bytes(fuse(Stack(), backend="eager", partition=budget(least)), x) <= least


def peak_of_step(model: nn.Module, x: Tensor) -> int:
    """The most bytes alive at once in forward and backward, beside what was there before, by torch's profiler."""
    gradient = torch.ones_like(model(x))
    model(x).backward(gradient)
    with torch.profiler.profile(profile_memory=True) as profile:
        out = model(x)
        out.backward(gradient)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    del out
    return max(itertools.accumulate(allocated))


def test_a_smaller_budget_does_not_raise_the_peak() -> None:
    # https://github.com/pytorch/pytorch/issues/197838
    blocks, x = GPT(layers=3).blocks, torch.randn(4, 64, 64, requires_grad=True)
    stack = nn.Sequential(*blocks)
    whole = peak_of_step(fuse(stack, backend="eager", partition="default"), x)
    for share in (0.1, 0.03):  # some layers, and all of them, are recomputed from the input of the first
        fused = fuse(stack, backend="eager", partition=budget(share))
        peak, totals = peak_of_step(fused, x), explain(fused, x).totals["this"]
        assert peak <= 0.65 * whole
        assert totals.saved_bytes == saved_bytes(fused, x)
        if "eager" == "eager":
            assert totals.peak_bytes == peak


def test_what_is_recomputed_twice_has_the_same_values_and_gradients() -> None:
    stack, x = Stack(), torch.randn(128, 64, requires_grad=True)
    fused = fuse(stack, backend="eager", partition=budget(0.12))
    report = explain(fused, x)
    names = [value.name for value in report.recomputed]
    assert len(names) > len(set(names)), "nothing is recomputed twice"
    results = []
    for model in (stack, fused):
        torch.manual_seed(1)
        out = model(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
