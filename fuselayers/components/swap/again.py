"""Functions whose inputs are recomputed in backward instead of saved."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch.dispatch import is_compiling, jit_is_tracing, transforms_are_active
from ...ops.implementations import gradients_by_formula


def _records() -> bool:
    """Return whether autograd alone decides what is saved: it records, and no compiler or transform is active."""
    return not (is_compiling() or transforms_are_active() or jit_is_tracing()) and torch.is_grad_enabled()


def linear_again(
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
        return F.linear(make(*sources), weight, bias)
    rows: Tensor = _LinearAgain.apply(make, weight, bias, *sources)  # type: ignore[no-untyped-call]
    # The view is made here, since a view that a custom function returns cannot be written into.
    return rows.view(*sources[0].shape[:-1], rows.shape[-1])


def made_again(make: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """Return make(*sources), and save only the sources. See `linear_again`."""
    if not _records():
        return make(*sources)
    made: Tensor = _MadeAgain.apply(make, *sources)  # type: ignore[no-untyped-call]
    return made


class _LinearAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Tensor], weight: Tensor, bias: Tensor | None, *sources: Tensor) -> Tensor:
        made = make(*sources)
        ctx.make, ctx.autocast = make, _autocast(made)
        ctx.save_for_backward(weight, *sources)
        return F.linear(_as_rows(made), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *sources = ctx.saved_tensors
        wants_weight, wants_bias, *needs = ctx.needs_input_grad[1:]
        dbias = dy.sum(0) if wants_bias else None
        if torch.is_grad_enabled():  # under create_graph

            def formula(weight: Tensor, *sources: Tensor) -> Tensor:
                with _autocast_of_forward(ctx):
                    return F.linear(_as_rows(ctx.make(*sources)), weight)

            wanted = wants_weight, *needs
            dweight, *gradients = gradients_by_formula(formula, (weight, *sources), dy, wanted)
            return None, dweight, dbias, *gradients
        dsources: list[Tensor | None] = [None] * len(sources)
        dweight = None
        if wants_weight or any(needs):
            made, inputs = _made(ctx, sources, needs)
        if any(needs):
            dmade = dy @ weight.to(dy.dtype)
            dsources = _through(made, inputs, dmade.view(made.shape).to(made.dtype))
        if wants_weight:
            rows = _as_rows(made.detach()).to(dy.dtype)  # the product's dtype, which autocast may have set
            dweight = (dy.T @ rows).to(weight.dtype)
        return None, dweight, dbias, *dsources


class _MadeAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Tensor], *sources: Tensor) -> Tensor:
        made = make(*sources)
        ctx.make, ctx.autocast = make, _autocast(made)
        ctx.save_for_backward(*sources)
        return made

    @staticmethod
    def backward(ctx: Any, dmade: Tensor) -> tuple[Tensor | None, ...]:
        sources, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]

        def formula(*sources: Tensor) -> Tensor:
            with _autocast_of_forward(ctx):
                made: Tensor = ctx.make(*sources)
                return made

        return None, *gradients_by_formula(formula, sources, dmade, needs)


def _autocast(made: Tensor) -> tuple[str, bool, torch.dtype]:
    device = made.device.type
    if not torch.amp.is_autocast_available(device):  # such as the meta device
        return "cpu", False, torch.bfloat16
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _autocast_of_forward(ctx: Any) -> torch.autocast:
    device, enabled, dtype = ctx.autocast
    return torch.autocast(device, dtype, enabled=enabled)


def _made(ctx: Any, sources: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
    """Recompute the value of forward under autograd; return it and its leaves."""
    with torch.enable_grad(), _autocast_of_forward(ctx):
        inputs = [source.detach().requires_grad_(need) for source, need in zip(sources, needs, strict=True)]
        return ctx.make(*inputs), inputs


def _through(made: Tensor, inputs: Sequence[Tensor], dmade: Tensor) -> list[Tensor | None]:
    """Return the gradients of the inputs; None for an input that requires none."""
    wanted = [source for source in inputs if source.requires_grad]
    gradients = iter(torch.autograd.grad(made, wanted, dmade))
    return [next(gradients) if source.requires_grad else None for source in inputs]


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
