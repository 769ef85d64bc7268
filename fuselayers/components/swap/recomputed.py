"""Functions whose inputs are recomputed in backward instead of saved."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._torch.dispatch import is_compiling, jit_is_tracing, transforms_are_active
from ...ops import linear
from ...ops.implementations import gradients_by_formula
from ...ops.linear import product


def _records() -> bool:
    """Return whether autograd alone decides what is saved: it records, and no compiler or transform is active."""
    return not (is_compiling() or transforms_are_active() or jit_is_tracing()) and torch.is_grad_enabled()


def linear_of_recomputed(
    make: Callable[..., Tensor], sources: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return make(*sources) @ weight.T + bias; save the sources for backward, which recomputes make(*sources).

    A compiler traces the plain functions and decides what to save. A transform of `torch.func` runs them too.

    Args:
        make: a deterministic function of the sources, [..., K]. The first source has the same shape except for the last
            dimension. The function must not hold tensors, since hooks on saved tensors could not free them.
        sources: tensors; their gradients are computed through `make`.
        weight: [N, K]
        bias: [N] or None.
    """
    if not _records():
        return linear(make(*sources), weight, bias)
    rows: Tensor = _LinearOfRecomputed.apply(make, weight, bias, *sources)  # type: ignore[no-untyped-call]
    # The view is made here, since a view that a custom function returns cannot be written into.
    return rows.view(*sources[0].shape[:-1], rows.shape[-1])


def recomputed_in_backward(make: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """Return make(*sources), and save only the sources. See `linear_of_recomputed`."""
    if not _records():
        return make(*sources)
    made: Tensor = _Recomputed.apply(make, *sources)  # type: ignore[no-untyped-call]
    return made


class _LinearOfRecomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Tensor], weight: Tensor, bias: Tensor | None, *sources: Tensor) -> Tensor:
        made = make(*sources)
        ctx.make, ctx.autocast, ctx.shape, ctx.dtype = make, _autocast(made), made.shape, made.dtype
        ctx.save_for_backward(weight, *sources)
        return linear(_as_rows(made), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *sources = ctx.saved_tensors
        wants_weight, wants_bias, *needs = ctx.needs_input_grad[1:]
        multiply = torch.matmul if torch.is_grad_enabled() else product
        made: Tensor | None = None
        dsources: list[Tensor | None] = [None] * len(sources)

        def formula(*sources: Tensor) -> Tensor:
            nonlocal made  # the gradient of the weight needs it too
            made = _recompute(ctx, *sources)
            return made

        if any(needs):
            dmade = multiply(dy, weight.to(dy.dtype))
            dsources = gradients_by_formula(formula, sources, dmade.view(ctx.shape).to(ctx.dtype), needs)
        dweight = None
        if wants_weight:
            rows = _as_rows(formula(*sources) if made is None else made)
            # In the product's dtype, which autocast may have set.
            dweight = multiply(dy.T, rows.to(dy.dtype)).to(weight.dtype)
        return None, dweight, dy.sum(0) if wants_bias else None, *dsources


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Tensor], *sources: Tensor) -> Tensor:
        made = make(*sources)
        ctx.make, ctx.autocast = make, _autocast(made)
        ctx.save_for_backward(*sources)
        return made

    @staticmethod
    def backward(ctx: Any, dmade: Tensor) -> tuple[Tensor | None, ...]:
        gradients = gradients_by_formula(
            functools.partial(_recompute, ctx), ctx.saved_tensors, dmade, ctx.needs_input_grad[1:]
        )
        return None, *gradients


def _autocast(made: Tensor) -> tuple[str, bool, torch.dtype]:
    device = made.device.type
    if not torch.amp.is_autocast_available(device):  # such as the meta device
        return "cpu", False, torch.bfloat16
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _recompute(ctx: Any, *sources: Tensor) -> Tensor:
    """Recompute the value of forward."""
    device, enabled, dtype = ctx.autocast
    with torch.autocast(device, dtype, enabled=enabled):
        made: Tensor = ctx.make(*sources)
        return made


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
