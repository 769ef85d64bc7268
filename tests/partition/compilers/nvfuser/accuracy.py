"""The accuracy of a fused function: its error is at most twice that of plain torch in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Ran", "assert_accurate", "run"]

# Relative errors that are allowed where plain torch happens to be exact.
_TINY = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


class Ran:
    """The outputs of a function, and the gradients of its inputs."""

    def __init__(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self.outputs = [one.detach() for one in outputs]
        self.gradients = list(gradients)

    @property
    def all(self) -> list[Tensor]:
        return self.outputs + self.gradients


def run(fn: Callable[..., Any], inputs: Sequence[Tensor], *, incoming: torch.dtype) -> Ran:
    """Call a function and its backward, with the same incoming gradients for every dtype.

    Args:
        fn: returns a tensor or a tuple of them.
        inputs: its arguments.
        incoming: the dtype that the incoming gradients are rounded to.
    """
    returned = fn(*inputs)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(one.shape, generator=generator).to(incoming).to(one.device) for one in outputs]
    learning = [one for one in inputs if one.requires_grad]
    pairs = [(one, gradient.to(one.dtype)) for one, gradient in zip(outputs, drawn, strict=True) if one.requires_grad]
    given = torch.autograd.grad([one for one, _ in pairs], learning, [one for _, one in pairs]) if pairs else ()
    return Ran(outputs, given)


def assert_accurate(fused: Ran, plain: Ran, exact: Ran, *, scale: float = 2.0) -> None:
    """Fail unless each result of `fused` is at most `scale` times as far from `exact`, in float64, as `plain` is."""
    for place, (got, other, truth) in enumerate(zip(fused.all, plain.all, exact.all, strict=True)):
        assert (got.dtype, got.shape) == (other.dtype, other.shape)
        error, plain_error = ((one.double() - truth.double()).abs().max().item() for one in (got, other))
        size = max(truth.double().abs().max().item(), 1.0)
        limit = scale * plain_error + _TINY[got.dtype] * size
        assert error <= limit, f"result {place}: error {error:.3g}, plain torch {plain_error:.3g}"
