"""linear_again -- a linear layer whose input is made again in backward, and not saved."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch.dispatch import is_compiling, jit_is_tracing, transforms_are_active

__all__ = ["linear_again"]


def linear_again(
    make: Callable[..., Tensor], sources: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return make(*sources) @ weight.T + bias, and save the sources for backward in place of what is made of them.

    A compiler that traces this sees the plain functions and decides by itself. A transform of `torch.func` runs them.
    In eager mode there is no second derivative.

    Args:
        make: a function of the sources that gives the same values each time, [..., K].
        sources: tensors; what they require gradients for is computed through `make`.
        weight: [N, K].
        bias: [N], or None.
    """
    if is_compiling() or transforms_are_active() or jit_is_tracing() or not torch.is_grad_enabled():
        return F.linear(make(*sources), weight, bias)
    rows: Tensor = _LinearAgain.apply(make, weight, bias, *sources)  # type: ignore[no-untyped-call]
    # Out here, since what a custom function returns as a view cannot be written into.
    return rows.view(*sources[0].shape[:-1], weight.shape[0])


class _LinearAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Tensor], weight: Tensor, bias: Tensor | None, *sources: Tensor) -> Tensor:
        made = make(*sources)
        ctx.make = make
        device = made.device.type
        ctx.autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        ctx.save_for_backward(weight, *sources)
        ctx.has_bias = bias is not None
        return F.linear(_as_rows(made), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *sources = ctx.saved_tensors
        _, needs_weight, needs_bias, *needs = ctx.needs_input_grad
        device, enabled, dtype = ctx.autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled):
            inputs = [source.detach().requires_grad_(need) for source, need in zip(sources, needs, strict=True)]
            made = ctx.make(*inputs)
        dy = dy.to(made.dtype)
        dweight = dbias = None
        dsources: list[Tensor | None] = [None] * len(inputs)
        if any(needs):
            wanted = [one for one in inputs if one.requires_grad]
            dmade = (dy @ weight.to(dy.dtype)).view(made.shape)
            given = iter(torch.autograd.grad(made, wanted, dmade))
            dsources = [next(given) if one.requires_grad else None for one in inputs]
        if needs_weight:
            dweight = (dy.T @ _as_rows(made.detach())).to(weight.dtype)
        if needs_bias and ctx.has_bias:
            dbias = dy.sum(0)
        return None, dweight, dbias, *dsources


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
