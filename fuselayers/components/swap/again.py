"""Functions of values that are made again in backward, and not saved."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch.dispatch import is_compiling, jit_is_tracing, transforms_are_active
from ...ops.implementations import differentiable_gradients

__all__ = ["linear_again", "linears_again", "made_again"]


def _records() -> bool:
    """Whether autograd records, and no compiler or transform that decides by itself what to save."""
    return not (is_compiling() or transforms_are_active() or jit_is_tracing()) and torch.is_grad_enabled()


def linear_again(
    make: Callable[..., Tensor], sources: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return make(*sources) @ weight.T + bias, and save the sources for backward in place of what is made of them.

    See `linears_again`.
    """
    return linears_again(make, sources, [(weight, bias)])[0]


def linears_again(
    make: Callable[..., Tensor], sources: tuple[Tensor, ...], layers: Sequence[tuple[Tensor, Tensor | None]]
) -> list[Tensor]:
    """Return make(*sources) @ weight.T + bias for each layer, and save the sources in place of what is made of them.

    A compiler that traces this sees the plain functions and decides by itself. A transform of `torch.func` runs them.
    In eager mode there is no second derivative.

    Args:
        make: a function of the sources that gives the same values each time, [..., K]. The first source has its shape
            but for the last dimension.
        sources: tensors; what they require gradients for is computed through `make`.
        layers: weights [N, K] and biases, [N] or None.
    """
    if not _records():
        made = make(*sources)
        return [F.linear(made, weight, bias) for weight, bias in layers]
    flat = [one for layer in layers for one in layer]
    rows: tuple[Tensor, ...] = _LinearsAgain.apply(make, len(sources), *sources, *flat)  # type: ignore[no-untyped-call]
    # Out here, since what a custom function returns as a view cannot be written into.
    return [one.view(*sources[0].shape[:-1], one.shape[-1]) for one in rows]


def made_again(make: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """Return make(*sources), and save the sources alone. See `linears_again`; this has a second derivative."""
    if not _records():
        return make(*sources)
    made: Tensor = _MadeAgain.apply(make, *sources)  # type: ignore[no-untyped-call]
    return made


class _LinearsAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Tensor], count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        sources, layers = tensors[:count], tensors[count:]
        made = make(*sources)
        ctx.make, ctx.count, ctx.autocast = make, count, _autocast(made)
        ctx.save_for_backward(*sources, *layers[::2])
        return tuple(F.linear(_as_rows(made), weight, bias) for weight, bias in _pairs(layers))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing makes them again for one reading
        sources, weights = saved[: ctx.count], saved[ctx.count :]
        needs, needs_of_layers = ctx.needs_input_grad[2 : 2 + ctx.count], ctx.needs_input_grad[2 + ctx.count :]
        made, inputs = _made(ctx, sources, needs)
        dsources: list[Tensor | None] = [None] * ctx.count
        if any(needs):
            parts = [dy @ weight.to(dy.dtype) for dy, weight in zip(dys, weights, strict=True)]
            dsources = _through(made, inputs, _sum(parts).view(made.shape).to(made.dtype))
        found: list[Tensor | None] = []
        rows = _as_rows(made.detach()).to(dys[0].dtype)  # autocast's, as that of the product
        for dy, weight, (wants_weight, wants_bias) in zip(dys, weights, _pairs(needs_of_layers), strict=True):
            found += [(dy.T @ rows).to(weight.dtype) if wants_weight else None, dy.sum(0) if wants_bias else None]
        return None, None, *dsources, *found


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
        if torch.is_grad_enabled():  # under create_graph
            return None, *differentiable_gradients(ctx.make, sources, (dmade,), needs)
        made, inputs = _made(ctx, sources, needs)
        return None, *_through(made, inputs, dmade)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total, *rest = parts
    for one in rest:
        total = total + one
    return total


def _autocast(made: Tensor) -> tuple[str, bool, torch.dtype]:
    device = made.device.type
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _made(ctx: Any, sources: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
    """What forward made, recorded, and the inputs that it is recorded from."""
    device, enabled, dtype = ctx.autocast
    with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled):
        inputs = [source.detach().requires_grad_(need) for source, need in zip(sources, needs, strict=True)]
        return ctx.make(*inputs), inputs


def _through(made: Tensor, inputs: Sequence[Tensor], dmade: Tensor) -> list[Tensor | None]:
    """The gradients of the inputs."""
    wanted = [one for one in inputs if one.requires_grad]
    given = iter(torch.autograd.grad(made, wanted, dmade))
    return [next(given) if one.requires_grad else None for one in inputs]


def _pairs(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
