import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fuselayers.partition import fuse, saved_bytes
from fuselayers.partition.passes import checkpoint_tags_pass
from fuselayers.testing import results
from tests.partition.tracing import Hand, ops_of, saved_of, split_of

AGAIN, SAVE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


SINE = torch.ops.aten.sin.default


def tag(module: fx.GraphModule) -> None:
    before = str(module.graph)
    assert checkpoint_tags_pass(module) is module
    assert str(module.graph) == before


def region(number: int, **more: Any) -> dict[str, Any]:
    return {"recompute": AGAIN, "ac_graph_id": number, **more}


class TestTags:
    def test_a_collective_is_saved_unless_its_region_is_checkpointed(self) -> None:
        pytest.importorskip("torch.distributed._functional_collectives")
        hand = Hand("x")
        (x,) = hand.inputs
        reduce = torch.ops._c10d_functional.all_reduce.default
        plain = hand.call(reduce, x, "sum", "")
        checkpointed = hand.call(reduce, x, "sum", "", **region(1))
        tag(hand.module(plain, checkpointed))
        assert plain.meta["recompute"] is SAVE
        assert checkpointed.meta["recompute"] is AGAIN

    def test_an_output_of_a_region_whose_gradient_a_hook_waits_for(self) -> None:
        hand = Hand("x")
        hooked = hand.call(SINE, *hand.inputs, **region(1, has_backward_hook=True))
        read_on = hand.call(SINE, *hand.inputs, **region(1, has_backward_hook=True))
        inside = hand.call(SINE, read_on, **region(1))
        tag(hand.module(hooked, inside))
        assert hooked.meta["recompute"] is SAVE
        assert read_on.meta["recompute"] is AGAIN  # the region reads it: recomputing it closes no cycle


def with_policy(policy: CheckpointPolicy, target: Any) -> Callable[..., Any]:
    """Contexts for `checkpoint` that set the policy of an op; the others are recomputed."""

    def choose(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op is target else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, choose)


SIZE = 64
UNIT = SIZE * SIZE * 4


def body(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).sin().exp().cos() @ weight


def inputs() -> list[Tensor]:
    return [torch.randn(SIZE, SIZE, requires_grad=True) * 0.1 for _ in range(2)]


class TestPolicies:
    @pytest.mark.parametrize(
        ("backend", "partition"),
        [("eager", "default"), ("eager", "min_cut"), pytest.param("inductor", "min_cut", marks=pytest.mark.slow)],
    )
    def test_a_whole_region(self, backend: str, partition: str) -> None:
        def layer(x: Tensor, weight: Tensor) -> Tensor:
            out: Tensor = checkpoint(body, x, weight, use_reentrant=False)
            return out

        tensors = inputs()
        fused = fuse(layer, backend=backend, partition=partition, fallback=())
        torch.testing.assert_close(results(fused, tensors), results(body, tensors), rtol=1e-4, atol=1e-5)
        # x and the weight
        assert saved_bytes(fused, *tensors) == 2 * UNIT
        assert saved_bytes(fuse(body, backend="eager", partition="default"), *tensors) >= 4 * UNIT

    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("partition", ["default", "min_cut"])
    @pytest.mark.parametrize("op", [torch.ops.aten.mm.default, torch.ops.aten.exp.default], ids=["mm", "exp"])
    def test_must_save(self, op: Any, partition: str, fused: bool) -> None:
        def layer(x: Tensor, weight: Tensor) -> Tensor:
            out: Tensor = checkpoint(
                body, x, weight, use_reentrant=False, context_fn=with_policy(CheckpointPolicy.MUST_SAVE, op)
            )
            return out.sin()

        forward, backward = split_of(layer, *inputs(), partition=partition, fused=fused)
        handed = {str(node.target) for node in saved_of(forward)}
        assert str(op) in handed
        # mm: backward has two for each of forward; the rest is recomputed
        assert ops_of(backward).count("exp") == (0 if op is torch.ops.aten.exp.default else 1)
        assert ops_of(backward).count("mm") == (4 if op is torch.ops.aten.mm.default else 6)

    def test_an_input_that_the_region_overwrites(self) -> None:
        """Eager recomputes such a region from the new value, so its gradient is wrong; `fuse` keeps the old value."""

        def work(buffer: Tensor, x: Tensor) -> Tensor:
            old = buffer.clone()
            buffer.zero_()
            return (old.sin() * x).exp()

        def layer(buffer: Tensor, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(work, buffer, x, use_reentrant=False)
            return out

        for partition in ("default", "min_cut"):
            for shape in ((64,), ()):
                buffer, x = torch.full(shape, 2.0), torch.randn(64, requires_grad=True)
                fused = fuse(layer, backend="eager", partition=partition, fallback=())
                out = fused(buffer, x)
                assert buffer.abs().sum() == 0
                factor = torch.tensor(2.0).sin()
                torch.testing.assert_close(out, (factor * x).exp())
                torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], factor * out.detach())
