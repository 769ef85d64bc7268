"""What `fuselayers bench op` times: each op, its inputs, and what a user would write without this library.

Legend of the shapes: x is [..., D]; for `rotary` it is [B, T, D], split into H heads of C channels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ...names import no_such
from ...ops import NormStyle

__all__ = ["OPS", "OpCase", "Outputs", "Settings", "double", "dtype_name", "op_case"]

Outputs = Tensor | tuple[Tensor, ...]

_HEAD_DIM: Final = 64
# By style; "post" and "pre" write no gradient of the residual beside another, or it is dy itself.
_FLOORS: Final[dict[NormStyle, tuple[float, float]]] = {"post": (4, 4), "pre": (4, 3), "prenorm": (4, 5)}
# Of a linear layer's width, for the hidden width of an MLP and for a vocabulary.
_EXPANSION: Final = 4


@dataclass(frozen=True)
class Settings:
    """What one call of an op is like: the shape and dtype of x, the dropout probability, the activation.

    Args:
        bias: whether an op that takes a bias gets one.
        style: of an op that knows several arrangements of its norm.
    """

    shape: tuple[int, ...]
    dropout: float
    activation: str
    dtype: torch.dtype
    device: torch.device
    bias: bool = True
    style: NormStyle = "post"


@dataclass(frozen=True)
class OpCase:
    """One op with inputs of its own.

    Args:
        op: the library's function.
        plain: plain eager PyTorch with the same arguments.
        tensors: the tensors both take, by name; all distinct, floats that require gradients unless they are tables.
        options: the arguments that are no tensors, of the library's function.
        floor: what forward and backward must load and store, in tensors of the first one's size, as the op's docstring
            says; None where an op's time is not that of moving its tensors.
    """

    op: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    floor: tuple[float, float] | None = None


def op_case(name: str, settings: Settings) -> OpCase:
    """The case of an op.

    Raises:
        ValueError: no such op, or a shape that does not fit it.

    >>> settings = Settings((2, 8), dropout=0.0, activation="gelu", dtype=torch.float32, device=torch.device("cpu"))
    >>> sorted(op_case("bias_dropout_residual", settings).tensors)
    ['bias', 'residual', 'x']
    """
    if name not in OPS:
        raise ValueError(no_such("op", name, OPS))
    ops.check_activation(settings.activation)
    ops.check_probability(settings.dropout)
    return OPS[name](settings)


def double(case: OpCase) -> OpCase:
    """The same case in float64: the truth."""
    tensors = {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for name, tensor in case.tensors.items()
    }
    return replace(case, tensors=tensors)


def dtype_name(dtype: torch.dtype) -> str:
    """As a user writes it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _activate(settings: Settings) -> OpCase:
    function = ops.ACTIVATIONS[settings.activation]
    return OpCase(
        op=ops.activate,
        plain=lambda z, activation: function(z),
        tensors={"z": _normal(settings, 0)},
        options={"activation": settings.activation},
        floor=(2, 3),
    )


def _dropout(settings: Settings) -> OpCase:
    return OpCase(
        op=ops.dropout,
        plain=lambda x, p: F.dropout(x, p),
        tensors={"x": _normal(settings, 0)},
        options={"p": settings.dropout},
        floor=(2, 2),
    )


def _bias_activation_dropout(settings: Settings) -> OpCase:
    function = ops.ACTIVATIONS[settings.activation]
    return OpCase(
        op=ops.bias_activation_dropout,
        plain=lambda x, bias=None, *, activation, p: F.dropout(function(x if bias is None else x + bias), p),
        tensors={"x": _normal(settings, 0), **_bias(settings, 1)},
        options={"activation": settings.activation, "p": settings.dropout},
        floor=(2, 3),
    )


def _bias_dropout_residual(settings: Settings) -> OpCase:
    return OpCase(
        op=ops.bias_dropout_residual,
        plain=lambda x, residual, bias=None, *, p: F.dropout(x if bias is None else x + bias, p) + residual,
        tensors={"x": _normal(settings, 0), "residual": _normal(settings, 1), **_bias(settings, 2)},
        options={"p": settings.dropout},
        floor=(3, 2),
    )


def _bias_dropout_residual_layer_norm(settings: Settings) -> OpCase:
    def plain(
        x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor, p: float, style: NormStyle
    ) -> Outputs:
        dropped = F.dropout(x + bias, p)
        if style == "pre":
            return F.layer_norm(dropped, weight.shape, weight, norm_bias) + residual
        total = dropped + residual
        y = F.layer_norm(total, weight.shape, weight, norm_bias)
        return (y, total) if style == "prenorm" else y

    return OpCase(
        op=ops.bias_dropout_residual_layer_norm,
        plain=plain,
        tensors={
            "x": _normal(settings, 0),
            "residual": _normal(settings, 1),
            "bias": _vector(settings, 2),
            "weight": _vector(settings, 3),
            "norm_bias": _vector(settings, 4),
        },
        options={"p": settings.dropout, "style": settings.style},
        floor=_FLOORS[settings.style],
    )


def _residual_layer_norm(settings: Settings) -> OpCase:
    def plain(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.layer_norm(total, weight.shape, weight, bias), total

    return OpCase(
        op=ops.residual_layer_norm,
        plain=plain,
        tensors={
            "x": _normal(settings, 0),
            "residual": _normal(settings, 1),
            "weight": _vector(settings, 2),
            "bias": _vector(settings, 3),
        },
        options={},
        floor=(4, 4),
    )


def _bias_dropout_residual_rms_norm(settings: Settings) -> OpCase:
    def plain(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, p: float, style: NormStyle) -> Outputs:
        dropped = F.dropout(x + bias, p)
        if style == "pre":
            return F.rms_norm(dropped, weight.shape, weight, 1e-6) + residual
        total = dropped + residual
        y = F.rms_norm(total, weight.shape, weight, 1e-6)
        return (y, total) if style == "prenorm" else y

    return OpCase(
        op=ops.bias_dropout_residual_rms_norm,
        plain=plain,
        tensors={
            "x": _normal(settings, 0),
            "residual": _normal(settings, 1),
            "bias": _vector(settings, 2),
            "weight": _vector(settings, 3),
        },
        options={"p": settings.dropout, "style": settings.style},
        floor=_FLOORS[settings.style],
    )


def _residual_rms_norm(settings: Settings) -> OpCase:
    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, 1e-6), total

    return OpCase(
        op=ops.residual_rms_norm,
        plain=plain,
        tensors={"x": _normal(settings, 0), "residual": _normal(settings, 1), "weight": _vector(settings, 2)},
        options={},
        floor=(4, 4),
    )


def _layer_norm(settings: Settings) -> OpCase:
    return OpCase(
        op=ops.layer_norm,
        plain=lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
        tensors={"x": _normal(settings, 0), "weight": _vector(settings, 1), "bias": _vector(settings, 2)},
        options={},
        floor=(2, 3),
    )


def _rms_norm(settings: Settings) -> OpCase:
    return OpCase(
        op=ops.rms_norm,
        plain=lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
        tensors={"x": _normal(settings, 0), "weight": _vector(settings, 1)},
        options={},
        floor=(2, 3),
    )


def _gated_activation(settings: Settings) -> OpCase:
    function = ops.ACTIVATIONS[settings.activation]
    return OpCase(
        op=ops.gated_activation,
        plain=lambda gate, up, activation: function(gate) * up,
        tensors={"gate": _normal(settings, 0), "up": _normal(settings, 1)},
        options={"activation": settings.activation},
        floor=(3, 5),
    )


def _rotary(settings: Settings) -> OpCase:
    if len(settings.shape) != 3 or settings.shape[-1] % _HEAD_DIM:
        raise ValueError(
            f"rotary needs a shape BATCHxTOKENSxWIDTH whose width is a multiple of {_HEAD_DIM} (a head), "
            f"got {'x'.join(map(str, settings.shape))}"
        )
    batch, length, width = settings.shape
    # As a projection gives them: the heads of a token side by side.
    shape = batch, length, width // _HEAD_DIM, _HEAD_DIM
    q, k = (_drawn(shape, settings, seed).transpose(1, 2).requires_grad_() for seed in (0, 1))
    frequencies = 10000.0 ** -(torch.arange(0, _HEAD_DIM, 2, device=settings.device) / _HEAD_DIM)
    angles = torch.arange(length, device=settings.device)[:, None] * frequencies
    # The rotation is computed in the dtype of the tables, float32 at least.
    table_dtype = torch.promote_types(settings.dtype, torch.float32)

    def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def rotate(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

        return rotate(q), rotate(k)

    return OpCase(
        op=ops.rotary,
        plain=plain,
        tensors={
            "q": q,
            "k": k,
            "cos": angles.cos().to(table_dtype),
            "sin": angles.sin().to(table_dtype),
        },
        options={},
        floor=(4, 4),
    )


def _softmax(settings: Settings) -> OpCase:
    return OpCase(
        op=ops.softmax,
        plain=lambda scores: F.softmax(scores, -1),
        tensors={"scores": _normal(settings, 0)},
        options={},
        floor=(2, 3),
    )


def _cross_entropy(settings: Settings) -> OpCase:
    return OpCase(
        op=ops.cross_entropy,
        plain=lambda logits, target: F.cross_entropy(logits.flatten(0, -2), target.flatten()),
        tensors={"logits": _normal(settings, 0), "target": _targets(settings, settings.shape[-1])},
        options={},
        floor=(1, 2),
    )


def _linear_cross_entropy(settings: Settings) -> OpCase:
    def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).flatten(0, -2), target.flatten())

    return OpCase(
        op=ops.linear_cross_entropy,
        plain=plain,
        tensors={
            "x": _normal(settings, 0),
            "weight": _matrix(settings, 1),
            "target": _targets(settings, _EXPANSION * settings.shape[-1]),
        },
        options={},
    )


def _linear_activation(settings: Settings) -> OpCase:
    function = ops.ACTIVATIONS[settings.activation]
    hidden = replace(settings, shape=(_EXPANSION * settings.shape[-1],))
    bias = {"bias": _vector(hidden, 2)} if settings.bias else {}
    return OpCase(
        op=ops.linear_activation,
        plain=lambda x, weight, bias=None, *, activation: function(F.linear(x, weight, bias)),
        tensors={"x": _normal(settings, 0), "weight": _matrix(settings, 1), **bias},
        options={"activation": settings.activation},
    )


OPS: Final[dict[str, Callable[[Settings], OpCase]]] = {
    "activate": _activate,
    "bias_activation_dropout": _bias_activation_dropout,
    "bias_dropout_residual": _bias_dropout_residual,
    "bias_dropout_residual_layer_norm": _bias_dropout_residual_layer_norm,
    "bias_dropout_residual_rms_norm": _bias_dropout_residual_rms_norm,
    "cross_entropy": _cross_entropy,
    "dropout": _dropout,
    "gated_activation": _gated_activation,
    "layer_norm": _layer_norm,
    "linear_activation": _linear_activation,
    "linear_cross_entropy": _linear_cross_entropy,
    "residual_layer_norm": _residual_layer_norm,
    "residual_rms_norm": _residual_rms_norm,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "softmax": _softmax,
}


def _normal(settings: Settings, seed: int) -> Tensor:
    return _drawn(settings.shape, settings, seed).requires_grad_()


def _vector(settings: Settings, seed: int) -> Tensor:
    return _drawn(settings.shape[-1:], settings, seed).requires_grad_()


def _drawn(shape: tuple[int, ...], settings: Settings, seed: int) -> Tensor:
    # On the device: a CPU draws billions of numbers in minutes.
    generator = torch.Generator(settings.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=settings.device).to(settings.dtype)


def _bias(settings: Settings, seed: int) -> dict[str, Tensor]:
    return {"bias": _vector(settings, seed)} if settings.bias else {}


def _matrix(settings: Settings, seed: int) -> Tensor:
    """A weight [4 D, D] under which what has a variance of one keeps it."""
    width = settings.shape[-1]
    return (_drawn((_EXPANSION * width, width), settings, seed) / math.sqrt(width)).requires_grad_()


def _targets(settings: Settings, classes: int) -> Tensor:
    target = torch.randint(classes, settings.shape[:-1], generator=torch.Generator().manual_seed(9))
    return target.to(settings.device)
