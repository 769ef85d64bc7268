import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.layers import TransformerLayer
from benchmarks.torch_min_cut import torch_min_cut_at_budget
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
from fuselayers.partition.choose.budget import smallest_saved_bytes
from fuselayers.partition.choose.partitioners import SavePolicy
from fuselayers.partition.choose.peak_bytes import peak_bytes
from fuselayers.partition.joint_graph import JointGraph
from fuselayers.partition.passes import with_compression
from tests.partition.tracing import gpt, joint_graph_of, peak_of_step, recomputed_flops


def least_of(joint: JointGraph) -> int:
    return smallest_saved_bytes(joint, cost=CostModel(machine_of("cpu")))


def bytes_of(rule: SavePolicy, joint: JointGraph) -> int:
    return joint.saved_bytes(rule.saved_values(joint, fused=True))


class TestOnAModel:
    # A tight, a middle and a loose share: torch saves other values at each.
    @pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
    def test_recomputes_no_more_flops_than_torch_at_equal_bytes(self, share: float) -> None:
        joint, torchs_joint = gpt().joint(), gpt().joint()
        static = list(gpt().static_input_indices)
        torchs_saved = torch_min_cut_at_budget(
            torchs_joint.module, share, num_fwd_outputs=1, static_lifetime_input_indices=static
        )
        limit = torchs_joint.saved_bytes(torchs_saved) + 1024
        saved = budget(limit).saved_values(joint, fused=True)
        assert joint.saved_bytes(saved) <= limit
        assert recomputed_flops(joint, saved) <= recomputed_flops(torchs_joint, torchs_saved)

    def test_fits_every_limit_and_more_bytes_never_cost_more_flops(self) -> None:
        joint = gpt().joint()
        low, high = least_of(joint), bytes_of(min_cut, joint)
        assert low < 0.1 * high
        flops = []
        for step in range(4):
            limit = low + (high - low) * step // 3
            saved = budget(limit).saved_values(joint, fused=True)
            assert joint.saved_bytes(saved) <= limit
            flops.append(recomputed_flops(joint, saved))
        assert flops == sorted(flops, reverse=True)
        assert flops[0] > 0
        assert flops[-1] == 0

    def test_with_room_enough_it_is_the_minimum_cut(self) -> None:
        joint = gpt().joint()
        for fused in (True, False):
            high = joint.saved_bytes(min_cut.saved_values(joint, fused=fused))
            assert budget(high).saved_values(joint, fused=fused) == min_cut.saved_values(joint, fused=fused)
            assert budget(1 << 60).saved_values(joint, fused=fused) == min_cut.saved_values(joint, fused=fused)

    @pytest.mark.parametrize("fused", [True, False])
    def test_a_share_is_of_what_the_default_saves(self, fused: bool) -> None:
        joint = gpt().joint()
        whole = joint.saved_bytes(default.saved_values(joint, fused=fused))
        for share in (0.1, 0.35, 0.5, 1.0):
            saved = joint.saved_bytes(budget(share).saved_values(joint, fused=fused))
            assert saved <= share * whole
            assert saved == joint.saved_bytes(budget(int(share * whole)).saved_values(joint, fused=fused))

    def test_too_small_says_how_little_will_do(self) -> None:
        joint = gpt().joint()
        least = least_of(joint)
        text = (
            rf"^this graph needs more than {least - 1:,} bytes saved for backward: the smallest cut found saves "
            rf"{least:,}; give a larger budget, or fuse a smaller part of the model$"
        )
        with pytest.raises(PartitionError, match=text):
            budget(least - 1).saved_values(joint, fused=True)
        assert bytes_of(budget(least), joint) == least


SHARE = r"^a budget given as a float is a share, 0 < share <= 1, got {}; give bytes as an int$"
LIMIT_TYPE = r"^a budget must be an int \(bytes\) or a float \(a share of what 'default' saves\), got True$"
PEAK_TYPE = r"^a peak must be an int \(bytes\) or a string such as '2 GB', got {}$"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"limit": 0}, ValueError, r"^a budget in bytes must be above 0, got 0$"),
        ({"limit": -5}, ValueError, r"^a budget in bytes must be above 0, got -5$"),
        ({"limit": 0.0}, ValueError, SHARE.format(r"0\.0")),
        ({"limit": 1.5}, ValueError, SHARE.format(r"1\.5")),
        ({"limit": math.nan}, ValueError, SHARE.format("nan")),
        ({"limit": True}, TypeError, LIMIT_TYPE),
        ({"limit": "1 GiB"}, ValueError, r"^a size is a number and one of GB, MB, kB, B, such as '2 GB', got '1 GiB'$"),
        ({"limit": "0 B"}, ValueError, r"^a budget in bytes must be above 0, got 0$"),
        ({"peak": 0}, ValueError, r"^a peak in bytes must be above 0, got 0$"),
        ({"peak": 0.5}, TypeError, PEAK_TYPE.format(r"0\.5")),
        ({"peak": True}, TypeError, PEAK_TYPE.format("True")),
        ({"peak": "2"}, ValueError, r"^a size is a number and one of GB, MB, kB, B, such as '2 GB', got '2'$"),
        ({}, TypeError, r"^a budget needs either a limit or a peak, got limit=None and peak=None$"),
        ({"limit": 0.5, "peak": 9}, TypeError, r"^a budget needs either a limit or a peak, got limit=0\.5 and peak=9$"),
    ],
    ids=str,
)
def test_budgets_that_are_none(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        budget(**options)


def assert_same_step(plain: nn.Module, fused: nn.Module, x: Tensor) -> None:
    """Assert that values and gradients are equal, from the same seed."""
    results = []
    for model in (plain, fused):
        torch.manual_seed(1)
        out = model(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


class Stack(nn.Module):
    def __init__(self, *, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = ops.dropout(layer(x).sin().exp(), 0.1) + x
        return x


class TestPeak:
    def cut(self, joint: JointGraph, rule: SavePolicy, *, compress: str | None = None) -> tuple[int, float]:
        """The peak bytes of a cut, and the FLOPs that it recomputes."""
        joint = joint if compress is None else with_compression(joint, compress)
        peak = peak_bytes(*rule.split(joint, fused=False), num_forward_outputs=1)
        return peak, recomputed_flops(joint, rule.saved_values(joint, fused=False))

    def test_a_lower_peak_never_gets_a_higher_one_and_the_lowest_is_named(self) -> None:
        joint = joint_graph_of(Stack(layers=6), torch.randn(128, 64, requires_grad=True))
        whole = self.cut(joint, min_cut)
        with pytest.raises(PartitionError) as error:
            self.cut(joint, budget(peak=1000))
        lowest = re.fullmatch(
            r"forward and backward of this graph need more than 1,000 bytes at once: the lowest peak found is "
            r"([\d,]+); give a larger peak, or fuse a smaller part of the model",
            str(error.value),
        )
        assert lowest
        least = int(lowest[1].replace(",", ""))
        assert least < 0.7 * whole[0]
        before, flops = 0, math.inf
        for step in range(4):
            limit = least + (whole[0] - least) * step // 3
            peak, again = self.cut(joint, budget(peak=limit))
            assert before <= peak <= limit
            assert again <= flops
            before, flops = peak, again
        assert (before, flops) == whole

    def test_the_allocator_sees_no_more_and_the_numbers_stay(self) -> None:
        stack, x = Stack(layers=6), torch.randn(128, 64, requires_grad=True)
        limit = int(0.7 * peak_of_step(fuse(stack, backend="eager"), x))
        fused = fuse(stack, backend="eager", partition=budget(peak=limit))
        assert peak_of_step(fused, x) <= limit
        assert_same_step(stack, fused, x)

    def test_compression_comes_before_a_matrix_product_runs_again(self) -> None:
        x = torch.randn(4, 64, 64, requires_grad=True)
        exact = joint_graph_of(nn.Sequential(*(TransformerLayer(64, 4) for _ in range(2))), x)
        peak, _ = self.cut(exact, min_cut, compress="int8")
        assert self.cut(exact, budget(peak=peak))[1] > 0
        assert self.cut(exact, budget(peak=peak), compress="int8") == (peak, 0)


@pytest.mark.parametrize(
    ("backend", "share"),
    [("eager", 0.3), ("eager", 0.12), pytest.param("inductor", 0.3, marks=pytest.mark.slow)],
)
def test_values_gradients_and_bytes(backend: str, share: float) -> None:
    stack, x = Stack(), torch.randn(128, 64, requires_grad=True)
    whole = saved_bytes(fuse(stack, backend="eager", partition="default"), x)
    fused = fuse(copy.deepcopy(stack), backend=backend, partition=budget(share))
    assert_same_step(stack, fused, x)
    assert saved_bytes(fused, x) <= share * whole
    names = [value.name for value in explain(fused, x).recomputed]
    assert share == 0.3 or len(names) > len(set(names)), "nothing is recomputed twice"


def test_a_smaller_budget_does_not_raise_the_peak() -> None:
    # https://github.com/pytorch/pytorch/issues/197838
    stack, x = nn.Sequential(*(TransformerLayer(64, 4) for _ in range(2))), torch.randn(4, 64, 64, requires_grad=True)
    whole = peak_of_step(fuse(stack, backend="eager", partition="default"), x)
    for share in (0.1, 0.035):  # recomputes some layers, then all of them, from the first layer's input
        fused = fuse(stack, backend="eager", partition=budget(share))
        peak = peak_of_step(fused, x)
        assert peak <= 0.65 * whole
    totals = explain(fused, x).totals["this"]
    assert totals.saved_bytes == saved_bytes(fused, x)
    assert 0 <= peak - totals.peak_bytes <= 1024  # oneDNN's own memory
