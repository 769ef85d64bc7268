"""The functions that `swap` puts in place of what a forward computes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import ops
from .again import linear_again


def _weight(layer: nn.Module) -> Tensor:
    """[N, K], of either kind of linear layer."""
    weight: Tensor = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T  # type: ignore[assignment]
    return weight


def _linear(x: Tensor, layer: nn.Module) -> Tensor:
    return F.linear(x, _weight(layer), layer.bias)  # type: ignore[arg-type]


def mlp(
    x: Tensor,
    *,
    up: nn.Module,
    activation: Callable[[Tensor], Tensor],
    down: nn.Module,
    inner: nn.Dropout | None = None,
    outer: nn.Dropout | None = None,
) -> Tensor:
    """down(activation(up(x))), which saves x and up(x)."""
    p = 0.0 if inner is None or not inner.training else inner.p
    seed = ops.draw_seed() if p else None

    def hidden(z: Tensor) -> Tensor:
        return ops.dropout(activation(z), p, seed=seed)

    y = linear_again(hidden, (_linear(x, up),), _weight(down), down.bias)  # type: ignore[arg-type]
    return y if outer is None else dropout(y, p=outer.p, training=outer.training)


def gated_mlp(
    x: Tensor, *, gate: nn.Module, up: nn.Module, activation: Callable[[Tensor], Tensor], down: nn.Module
) -> Tensor:
    """down(activation(gate(x)) * up(x)), which saves x, gate(x) and up(x)."""
    return linear_again(
        lambda g, u: activation(g) * u,
        (_linear(x, gate), _linear(x, up)),
        _weight(down),
        down.bias,  # type: ignore[arg-type]
    )


def packed_gated_mlp(
    x: Tensor, *, gate_up: nn.Module, activation: Callable[[Tensor], Tensor], down: nn.Module
) -> Tensor:
    """The same with one linear layer for gate and up."""

    def hidden(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return up * activation(gate)

    return linear_again(hidden, (_linear(x, gate_up),), _weight(down), down.bias)  # type: ignore[arg-type]


def linear_dropout_residual_norm(
    x: Tensor, residual: Tensor, *, dense: nn.Module, drop: nn.Dropout, norm: nn.LayerNorm
) -> Tensor:
    """norm(dropout(dense(x)) + residual)."""
    alike = _is_alike(residual, (*x.shape[:-1], norm.weight.shape[0]), x)
    if not alike or torch.is_autocast_enabled(x.device.type):  # which gives the sum and the norm dtypes of their own
        added: Tensor = norm(dropout(_linear(x, dense), p=drop.p, training=drop.training) + residual)
        return added
    y = ops.bias_dropout_residual_layer_norm(
        F.linear(x, _weight(dense)),
        residual,
        weight=norm.weight,
        norm_bias=norm.bias,
        bias=dense.bias,  # type: ignore[arg-type]
        p=drop.p,
        eps=norm.eps,
        training=drop.training,
    )
    assert isinstance(y, Tensor)
    return y


def module_dropout_residual(x: Tensor, residual: Tensor, *, drop: nn.Dropout) -> Tensor:
    """drop(x) + residual."""
    return dropout_residual(x, residual, p=drop.p, training=drop.training)


def dropout_residual(x: Tensor, residual: Tensor, *, p: float, training: bool) -> Tensor:
    """dropout(x) + residual."""
    if not _is_alike(residual, x.shape, x):
        return dropout(x, p=p, training=training) + residual
    return ops.bias_dropout_residual(x, residual, p=p, training=training)


def dropout(x: Tensor, *, p: float, training: bool, inplace: bool = False) -> Tensor:
    """Dropout that saves no mask."""
    return ops.dropout(x, p, training=training) if x.is_floating_point() else F.dropout(x, p, training)


def rms_norm(x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / rms(x)), in the wider dtype of both."""
    return _rms_norm(x, weight, eps).to(torch.promote_types(x.dtype, weight.dtype))


def rms_norm_as_x(x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / rms(x)), in x's dtype."""
    return _rms_norm(x, weight, eps).to(x.dtype)


def rms_norm_from_one(x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight), in x's dtype."""
    return _rms_norm(x, 1.0 + weight.float(), eps).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.shape == x.shape[-1:] and x.is_floating_point():
        return ops.rms_norm(x, weight=weight, eps=eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))


def _is_alike(residual: Any, shape: Sequence[int], x: Tensor) -> bool:
    """Whether the ops add it, which neither broadcast nor take two dtypes."""
    fits = isinstance(residual, Tensor) and residual.shape == torch.Size(shape) and residual.dtype == x.dtype
    return fits and x.is_floating_point()
