import functools
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fuselayers._torch.tracing import extract_forward_and_backward
from fuselayers.partition import fuse, min_cut
from fuselayers.partition.choose.peak_bytes import peak_bytes
from fuselayers.partition.passes import late_recompute_pass
from tests.partition.tracing import joint_graph_of, ops_of

SIZE = 32
UNIT = SIZE * SIZE * 4
SINE, MUL, COPY = torch.ops.aten.sin.default, torch.ops.aten.mul.Tensor, torch.ops.aten.copy_.default


def test_the_peak_of_checkpointed_layers_no_longer_grows_with_their_number() -> None:
    def layer(x: Tensor) -> Tensor:
        return x.sin().exp().cos().sin().exp().cos()

    def layers(count: int, x: Tensor) -> Tensor:
        for _ in range(count):
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    peaks: dict[int, tuple[int, int]] = {}
    for count in (2, 8):
        joint = joint_graph_of(functools.partial(layers, count), torch.randn(SIZE, SIZE, requires_grad=True))
        saved = min_cut.saved_values(joint, fused=False)
        assert len(saved) == count
        static = joint.static_inputs
        forward, backward = extract_forward_and_backward(joint.module, saved, num_fwd_outputs=1, static_inputs=static)
        before = peak_bytes(forward, backward, num_forward_outputs=1)
        peaks[count] = (before, peak_bytes(forward, late_recompute_pass(backward), num_forward_outputs=1))
    # Each layer saves one value and recomputes five or more.
    assert peaks[8][0] - peaks[2][0] >= 6 * 4 * UNIT
    assert peaks[8][1] - peaks[2][1] <= 6 * UNIT
    assert peaks[8][1] < 0.5 * peaks[8][0]


class Hand:
    """A backward graph made by hand, of the saved x and y and of tangents_1."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.y, self.gradient = (self.graph.placeholder(name) for name in ("x", "y", "tangents_1"))
        for node in (self.x, self.y, self.gradient):
            node.meta["val"] = torch.ones(4)

    def call(self, target: Any, *arguments: Any) -> fx.Node:
        node = self.graph.call_function(target, arguments)
        node.meta["val"] = torch.ones(4)
        return node

    def order(self, *outputs: Any) -> list[str]:
        self.graph.output(outputs)
        module = fx.GraphModule({}, self.graph)
        before = module(*arguments())
        assert late_recompute_pass(module) is module
        torch.testing.assert_close(module(*arguments()), before)
        return ops_of(module)


def arguments() -> list[Tensor]:
    return [torch.full((4,), value) for value in (0.3, 0.7, 1.1)]


def test_writes_and_other_effects_keep_their_order() -> None:
    hand = Hand()
    hand.call(COPY, hand.x, hand.y)
    hand.call(torch.ops.aten.add_.Tensor, hand.x, hand.y)
    check = hand.call(torch.ops.aten.ge.Scalar, hand.x, 0.0)
    whole = hand.call(torch.ops.aten.all.default, check)
    hand.call(torch.ops.aten._assert_async.msg, whole, "negative")
    hand.call(torch.ops.aten.mul_.Tensor, hand.x, hand.y)
    order = hand.order(hand.call(MUL, hand.gradient, hand.x))
    effects = [name for name in order if name in ("copy_", "add_", "_assert_async", "mul_")]
    assert effects == ["copy_", "add_", "_assert_async", "mul_"]


def test_draws_of_backward_keep_their_order() -> None:
    """Under `torch_random` backward draws the plain function's numbers, in the same order."""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            first, second = torch.rand(4), torch.rand(4)
            return (dy * second).cos() * first

    seen = []
    for fn in (Noisy.apply, fuse(lambda x: Noisy.apply(x), backend="eager", torch_random=True, fallback=())):
        for _ in range(2):  # the first backward compiles, which draws too
            x = torch.ones(4, requires_grad=True)
            out = fn(x).sum()
            torch.manual_seed(0)
            out.backward()
        seen.append(x.grad)
    assert torch.equal(seen[1], seen[0])
