"""The functions that `swap` puts in place of what a forward computes."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import ops
from ..._torch.dispatch import is_compiling
from ...ops.implementations import CPU_KERNELS_FROM
from .again import linear_again, made_again
from .children import calls_only
from .slots import original_type

Normalise = Callable[..., tuple[Callable[..., Tensor], tuple[Tensor, ...]]]
"""Takes the slots of a norm; returns a function of x and of its parameters, and the parameters."""


def _weight(layer: nn.Module) -> Tensor:
    """[N, K], of either kind of linear layer."""
    weight: Tensor = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T  # type: ignore[assignment]
    return weight


def _linear(x: Tensor, layer: nn.Module) -> Tensor:
    return F.linear(x, _weight(layer), layer.bias)  # type: ignore[arg-type]


def _probability(drop: nn.Dropout | None, p: float, training: bool) -> float:
    """Of a dropout layer, or of a call of `F.dropout`: what it drops in this call."""
    if drop is not None:
        p, training = drop.p, drop.training
    return p if training else 0.0


def _dropped(p: float) -> Callable[[Tensor], Tensor]:
    """Dropout with one mask, however often it is called."""
    seed = ops.draw_seed() if p else None
    return lambda x: ops.dropout(x, p, seed=seed)


def _gate(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """activation(gate) * up, as one op with one for its gradients where there is one."""
    # A compiler would have to trace the reading of a class, and makes one kernel of this anyway.
    if not is_compiling() and (
        activation is F.silu or type(activation) is nn.SiLU or calls_only(original_type(activation), F.silu)
    ):
        return lambda gate, up: (
            ops.gated_activation(gate, up, activation="silu")
            if gate.shape == up.shape and gate.dtype == up.dtype
            else activation(gate) * up
        )
    return lambda gate, up: activation(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with a tangent, as one op."""
    if x.is_floating_point():
        return F.gelu(x, approximate="tanh")
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def mlp(x: Tensor, *, up: nn.Module, activation: Callable[[Tensor], Tensor], **rest: Any) -> Tensor:
    """down(dropout(activation(up(x)))), which saves x and up(x); `rest` are the options of `_feedforward`."""
    return _feedforward(x, (up,), activation, **rest)


def gated_mlp(
    x: Tensor, *, gate: nn.Module, up: nn.Module, activation: Callable[[Tensor], Tensor], **rest: Any
) -> Tensor:
    """down(dropout(activation(gate(x)) * up(x))), which saves x, gate(x) and up(x)."""
    return _feedforward(x, (gate, up), _gate(activation), **rest)


def packed_gated_mlp(
    x: Tensor,
    *,
    gate_up: nn.Module,
    activation: Callable[[Tensor], Tensor],
    gate_first: bool = True,
    dim: int = -1,
    **rest: Any,
) -> Tensor:
    """The same with one linear layer for gate and up."""

    def hidden(both: Tensor) -> Tensor:
        first, second = both.chunk(2, dim=dim)
        return activation(first) * second if gate_first else first * activation(second)

    return _feedforward(x, (gate_up,), hidden, **rest)


def _feedforward(
    x: Tensor,
    layers: Sequence[nn.Module],
    hidden: Callable[..., Tensor],
    *,
    down: nn.Module,
    inner: nn.Dropout | None = None,
    inner_p: float = 0.0,
    inner_training: bool = False,
    middle: nn.Module | None = None,
    cast: bool = False,
) -> Tensor:
    """down(middle(dropout(hidden(layer(x) for each of the layers)))).

    Args:
        layers: their results are saved.
        hidden: a function of them, made again in backward.
        down: the last layer.
        inner: dropout before it; `inner_p` and `inner_training` are those of a call of `F.dropout`.
        middle: a norm before it.
        cast: whether its input gets its dtype.
    """
    drop, weight = _dropped(_probability(inner, inner_p, inner_training)), _weight(down)
    sources = [_linear(x, layer) for layer in layers]
    make, parameters = of_layer_norm(norm=middle) if isinstance(middle, nn.LayerNorm) else (lambda x: x, ())

    def made(*tensors: Tensor) -> Tensor:
        x: Tensor = make(drop(hidden(*tensors[: len(sources)])), *tensors[len(sources) :])
        return x.to(weight.dtype) if cast else x

    return linear_again(made, (*sources, *parameters), weight, down.bias)  # type: ignore[arg-type]


def dropout_residual_norm(
    x: Tensor,
    residual: Tensor,
    *,
    norm: nn.LayerNorm,
    drop: nn.Dropout | None = None,
    drop_p: float = 0.0,
    drop_training: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of the sum dropout(x) + residual, and the sum."""
    p = _probability(drop, drop_p, drop_training)
    alike = _is_alike(residual, x) and x.shape[-1:] == norm.weight.shape
    if not alike or torch.is_autocast_enabled(x.device.type):  # which gives the sum and the norm dtypes of their own
        s = (ops.dropout(x, p) if p else x) + residual
        return norm(s), s
    y, s = ops.bias_dropout_residual_layer_norm(
        *(x, residual), weight=norm.weight, norm_bias=norm.bias, p=p, eps=norm.eps, style="prenorm"
    )
    return y, s


def residual_rms_norm(x: Tensor, residual: Tensor, *, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The RMS norm of the sum x + residual, in the wider dtype of the sum and the weight, and the sum."""
    fits = _is_alike(residual, x) and weight.dtype == x.dtype and weight.shape == x.shape[-1:]
    if fits and not _is_formula(x):
        return ops.residual_rms_norm(x, residual, weight=weight, eps=eps)
    s = x + residual
    return rms_norm(s, weight=weight, eps=eps), s


def dropout_residual(
    x: Tensor,
    residual: Tensor,
    *,
    drop: nn.Dropout | None = None,
    drop_p: float = 0.0,
    drop_training: bool = False,
) -> Tensor:
    """dropout(x) + residual."""
    p = _probability(drop, drop_p, drop_training)
    if not _is_alike(residual, x):
        return dropout(x, drop_p=p, drop_training=True) + residual
    return ops.bias_dropout_residual(x, residual, p=p)


def dropout(x: Tensor, *, drop_p: float, drop_training: bool, inplace: bool = False) -> Tensor:
    """Dropout that saves no mask."""
    if not x.is_floating_point():
        return F.dropout(x, drop_p, drop_training)
    return ops.dropout(x, drop_p, training=drop_training)


def of_layer_norm(*, norm: nn.LayerNorm) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A layer norm."""
    shape, eps = norm.normalized_shape, norm.eps

    def make(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, shape, weight, bias, eps)

    return make, (norm.weight,) if norm.bias is None else (norm.weight, norm.bias)


def of_rms_norm(*, weight: Tensor, eps: float) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """weight * (x / rms(x)), in the wider dtype of both."""
    return lambda x, weight: _rms_norm(x, weight, eps).to(torch.promote_types(x.dtype, weight.dtype)), (weight,)


def of_rms_norm_as_x(*, weight: Tensor, eps: float) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """weight * (x / rms(x)), in x's dtype."""
    return lambda x, weight: _rms_norm(x, weight, eps).to(x.dtype), (weight,)


def of_rms_norm_from_one(*, weight: Tensor, eps: float) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """x / rms(x) * (1 + weight), in x's dtype."""
    return lambda x, weight: _rms_norm(x, 1.0 + weight.float(), eps).to(x.dtype), (weight,)


def of_wide_rms_norm(*, weight: Tensor, eps: float) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """weight * (x / rms(x)) as T5 has it: in the weight's dtype if that is of 16 bits, else in float32 at least."""

    def make(x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        half = weight.dtype in (torch.float16, torch.bfloat16)
        return _rms_norm(x.to(wide), weight, eps).to(weight.dtype if half else torch.promote_types(wide, weight.dtype))

    return make, (weight,)


def rms_norm(x: Tensor, *, normalise: Normalise = of_rms_norm, **norm: Any) -> Tensor:
    """An RMS norm, which saves x."""
    make, parameters = normalise(**norm)
    # The op saves more where it is its formula.
    return made_again(make, x, *parameters) if _is_formula(x) else make(x, *parameters)


def _is_formula(x: Tensor) -> bool:
    return x.is_cpu and x.numel() < CPU_KERNELS_FROM


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.shape == x.shape[-1:] and x.is_floating_point():
        return ops.rms_norm(x, weight=weight, eps=eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))


def _is_alike(residual: Any, x: Any) -> bool:
    """Whether the ops add these: two tensors, which they neither broadcast nor take in two dtypes."""
    if type(x) not in _PLAIN or type(residual) not in _PLAIN:  # a number, for one, or a shard
        return False
    return bool(residual.shape == x.shape and residual.dtype == x.dtype and x.is_floating_point())


_PLAIN: Final = frozenset({Tensor, nn.Parameter})
