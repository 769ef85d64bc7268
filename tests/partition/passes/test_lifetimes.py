import functools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fuselayers._torch.tracing import extract_forward_and_backward
from fuselayers.partition import fuse, min_cut
from fuselayers.partition.choose.peak_bytes import peak_bytes
from fuselayers.partition.passes import early_getitems_pass, late_recompute_pass
from tests.partition.tracing import Hand, joint_graph_of, ops_of

SIZE = 32
UNIT = SIZE * SIZE * 4
MUL, COPY = torch.ops.aten.mul.Tensor, torch.ops.aten.copy_.default


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


def test_writes_and_other_effects_keep_their_order() -> None:
    hand = Hand("x", "y", "tangents_1")
    x, y, gradient = hand.inputs
    hand.call(COPY, x, y)
    hand.call(torch.ops.aten.add_.Tensor, x, y)
    whole = hand.call(torch.ops.aten.all.default, hand.call(torch.ops.aten.ge.Scalar, x, 0.0))
    hand.call(torch.ops.aten._assert_async.msg, whole, "negative")
    hand.call(torch.ops.aten.mul_.Tensor, x, y)
    module = hand.module(hand.call(MUL, gradient, x))
    values = [torch.full((4,), value) for value in (0.3, 0.7, 1.1)]
    before = module(*(value.clone() for value in values))
    assert late_recompute_pass(module) is module
    torch.testing.assert_close(module(*values), before)
    effects = [name for name in ops_of(module) if name in ("copy_", "add_", "_assert_async", "mul_")]
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


def test_tuples_are_taken_apart_at_once_and_in_order() -> None:
    hand = Hand("x")
    pair = hand.call(torch.ops.aten.sort.default, *hand.inputs)
    sine = hand.call(torch.ops.aten.sin.default, *hand.inputs)
    second = hand.call(torch.ops.aten.sort.default, sine)
    values = hand.call(operator.getitem, pair, 0)
    late = hand.call(torch.ops.aten.cos.default, sine)
    indices = hand.call(operator.getitem, pair, 1)
    other = hand.call(operator.getitem, second, 0)
    module = hand.module(values, indices, other, late)
    argument = torch.randn(7)
    expected = module(argument)
    assert early_getitems_pass(module) is module
    assert ops_of(module) == ["sort", "getitem", "getitem", "sin", "sort", "getitem", "cos"]
    first, second = list(module.graph.nodes)[2:4]
    assert (first, second) == (values, indices)
    torch.testing.assert_close(module(argument), expected)
