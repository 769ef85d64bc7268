from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.partition import fuse


class WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.buffer.mul_(2.0)
        return dy * ctx.saved_tensors[0].cos(), None


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("in_forward_too", [False, True])
def test_a_buffer_that_backward_writes_to_is_written_to(partition: str, in_forward_too: bool) -> None:
    def step(x: Tensor, buffer: Tensor) -> Tensor:
        if in_forward_too:
            buffer.add_(1.0)
        return WritesInBackward.apply(x * 2, buffer) * buffer.detach()

    seen = []
    for fn in (step, fuse(step, backend="eager", partition=partition, fallback=())):
        x, buffer = torch.linspace(0, 1, 4).requires_grad_(), torch.ones(4)
        fn(x, buffer).sum().backward()
        seen.append((x.grad, buffer))
    torch.testing.assert_close(seen[1], seen[0])
    assert torch.equal(seen[1][1], torch.full((4,), 4.0 if in_forward_too else 2.0))


def test_strides_are_those_of_the_input_not_of_its_clone() -> None:
    def halved(x: Tensor) -> Tensor:
        x.mul_(0.5)
        return x.sin()

    weight = torch.randn(3, 32, requires_grad=True)
    x = (weight * 1)[:, ::2]
    y = fuse(halved, backend="eager", dynamic=True)(x)
    torch.testing.assert_close((x, y), (weight[:, ::2] * 0.5, (weight[:, ::2] * 0.5).sin()))
