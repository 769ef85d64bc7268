"""cuda_graphs -- call a function that Inductor's CUDA graphs run, so that its results are ordinary tensors.

The graphs write each result into their own memory, and the next call overwrites it: a loss that is kept, `.grad` after
the first backward, and gradients that accumulate would be wrong without an error. So results and gradients are copied
out of that memory. For a whole model the results are a loss, and the gradients those of its weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_copied_results(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled Dynamo graph as a function whose results and gradients the next call does not overwrite."""

    def call(*inputs: Any) -> Any:
        differentiable = [index for index, value in enumerate(inputs) if _wants_gradient(value)]
        if differentiable:
            views = _CopiedGradients.apply(*(inputs[index] for index in differentiable))  # type: ignore[no-untyped-call]
            by_index = dict(zip(differentiable, views, strict=True))
            inputs = tuple(by_index.get(index, value) for index, value in enumerate(inputs))
        return [value.clone() if isinstance(value, Tensor) else value for value in compiled(*inputs)]

    return call


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


class _CopiedGradients(torch.autograd.Function):
    """Returns its inputs, and copies their gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [gradient for gradient in gradients if gradient is not None]
        # One kernel for many tensors, where a copy of each would take the host longer than the step.
        copies = [torch.empty_like(gradient) for gradient in present]
        torch._foreach_copy_(copies, present)
        remaining = iter(copies)
        return tuple(None if gradient is None else next(remaining) for gradient in gradients)
