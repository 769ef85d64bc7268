"""The ops that `fuselayers bench` and `benchmarks.lint_kernels` call: inputs, and versions in plain PyTorch.

Legend of the shapes: x is [T, D], where T stands for all dimensions but the last one, and E = 4 D is the output width
of a linear layer. For `attention` and `rotary` x is [B, T, D], split into heads of 64 channels.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ...names import no_such
from ...ops import NormStyle

Outputs = Tensor | tuple[Tensor, ...]

_HEAD_DIM: Final = 64
_OF_HEADS: Final = ("attention", "rotary")
_EXPANSION: Final = 4
# By style. "post" and "pre" write no second gradient for the residual: it is dx, or dy itself.
_FLOORS: Final[dict[NormStyle, tuple[float, float]]] = {"post": (4, 4), "pre": (4, 3), "prenorm": (4, 5)}


@dataclass(frozen=True)
class Settings:
    """How an op is called: the shape and dtype of x, the options, and whether an optional bias is passed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    dropout: float = 0.1
    activation: str = "gelu"
    style: NormStyle = "post"
    bias: bool = True


@dataclass(frozen=True)
class OpCase:
    """One op with its inputs.

    Attributes:
        op: the library's function.
        plain: plain eager PyTorch with the same arguments.
        tensors: the arguments of both, by name; all distinct. Floating ones require gradients, except tables.
        options: the other arguments of both.
        floor: the least that forward and backward load and store, in multiples of the first tensor's size, as in the
            op's docstring; None for ops that memory bandwidth does not limit.
    """

    op: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    floor: tuple[float, float] | None


def op_case(name: str, settings: Settings) -> OpCase:
    """Return an op with inputs and options.

    Raises:
        ValueError: no such op, or a shape that does not fit it.
    """
    if name not in OPS:
        raise ValueError(no_such("op", name, OPS))
    ops.check_activation(settings.activation)
    ops.check_probability(settings.dropout)
    op, (plain, floor) = getattr(ops, name), OPS[name]
    shared = [argument for argument in signature(op).parameters if argument in signature(plain).parameters]
    options = {"activation": settings.activation, "p": settings.dropout, "style": settings.style}
    return OpCase(
        op=op,
        plain=plain,
        tensors=_head_tensors(name, settings) if name in _OF_HEADS else _tensors(name, shared, settings),
        options={option: value for option, value in options.items() if option in shared},
        floor=_FLOORS[settings.style] if "style" in shared else floor,
    )


def double(case: OpCase) -> OpCase:
    """Return the same case in float64."""
    tensors = {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for name, tensor in case.tensors.items()
    }
    return replace(case, tensors=tensors)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name as a user writes it: "float32"."""
    return str(dtype).removeprefix("torch.")


def _activated(x: Tensor, activation: str) -> Tensor:
    return ops.ACTIVATIONS[activation](x)


def _bias_activation_dropout(x: Tensor, bias: Tensor | None = None, *, activation: str, p: float) -> Tensor:
    return F.dropout(_activated(x if bias is None else x + bias, activation), p)


def _bias_dropout_residual(x: Tensor, residual: Tensor, bias: Tensor | None = None, *, p: float) -> Tensor:
    return F.dropout(x if bias is None else x + bias, p) + residual


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def _rms_norm(x: Tensor, weight: Tensor, bias: None = None) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def _residual_norm(
    norm: Callable[..., Tensor], x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Outputs:
    total = x + residual
    return norm(total, weight, bias), total


def _bias_dropout_residual_norm(
    norm: Callable[..., Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    p: float,
    style: NormStyle,
) -> Outputs:
    dropped = F.dropout(x if bias is None else x + bias, p)
    if style == "pre":
        return norm(dropped, weight, norm_bias) + residual
    total = dropped + residual
    y = norm(total, weight, norm_bias)
    return (y, total) if style == "prenorm" else y


def _attention(q: Tensor, k: Tensor, v: Tensor, *, p: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


_residual_layer_norm = partial(_residual_norm, _layer_norm)
_layer_norm_after_dropout = partial(_bias_dropout_residual_norm, _layer_norm)
_rms_norm_after_dropout = partial(_bias_dropout_residual_norm, _rms_norm)
OPS: Final[Mapping[str, tuple[Callable[..., Outputs], tuple[float, float] | None]]] = MappingProxyType(
    {
        "attention": (_attention, None),
        "activate": (lambda z, activation: _activated(z, activation), (2, 3)),
        "bias_activation_dropout": (_bias_activation_dropout, (2, 3)),
        "bias_dropout_residual": (_bias_dropout_residual, (3, 2)),
        "bias_dropout_residual_layer_norm": (_layer_norm_after_dropout, None),
        "bias_dropout_residual_rms_norm": (_rms_norm_after_dropout, None),
        "cross_entropy": (_cross_entropy, (1, 2)),
        "dropout": (lambda x, p: F.dropout(x, p), (2, 2)),
        "gated_activation": (lambda gate, up, activation: _activated(gate, activation) * up, (3, 5)),
        "layer_norm": (_layer_norm, (2, 3)),
        "linear": (lambda x, weight, bias=None: F.linear(x, weight, bias), None),
        "linear_cross_entropy": (lambda x, weight, target: _cross_entropy(F.linear(x, weight), target), None),
        "residual_layer_norm": (_residual_layer_norm, (4, 4)),
        "residual_rms_norm": (partial(_residual_norm, _rms_norm), (4, 4)),
        "rms_norm": (_rms_norm, (2, 3)),
        "rotary": (_rotary, (4, 4)),
    }
)
"""Plain PyTorch and the floor of each op. Its inputs are the arguments that the op and the plain function share."""


def _tensors(op: str, names: Iterable[str], settings: Settings) -> dict[str, Tensor]:
    *rows, width = settings.shape
    has_product = op in ("linear", "linear_cross_entropy")
    classes = _EXPANSION * width if has_product else width
    shapes = dict.fromkeys(("x", "z", "gate", "up", "residual", "logits"), settings.shape)
    shapes |= {"weight": (classes, width) if has_product else (width,), "bias": (classes,), "norm_bias": (width,)}
    tensors = {}
    for seed, name in enumerate(names):
        if name == "target":
            target = torch.randint(classes, tuple(rows), generator=torch.Generator().manual_seed(9))
            tensors[name] = target.to(settings.device)
        elif name in shapes and (name != "bias" or settings.bias):
            # The matrix product has unit variance.
            scale = 1 / math.sqrt(width) if has_product and name == "weight" else 1.0
            tensors[name] = (_drawn(shapes[name], settings, seed) * scale).requires_grad_()
    return tensors


def _head_tensors(op: str, settings: Settings) -> dict[str, Tensor]:
    if len(settings.shape) != 3 or settings.shape[-1] % _HEAD_DIM:
        raise ValueError(
            f"{op} needs a shape BATCHxTOKENSxWIDTH whose width is a multiple of {_HEAD_DIM} (a head), "
            f"got {'x'.join(map(str, settings.shape))}"
        )
    batch, length, width = settings.shape
    # As a projection returns them: the heads of a token side by side.
    shape = batch, length, width // _HEAD_DIM, _HEAD_DIM
    q, k, v = (_drawn(shape, settings, seed).transpose(1, 2).requires_grad_() for seed in (0, 1, 2))
    if op == "attention":
        return {"q": q, "k": k, "v": v}
    frequencies = 10000.0 ** -(torch.arange(0, _HEAD_DIM, 2, device=settings.device) / _HEAD_DIM)
    angles = torch.arange(length, device=settings.device)[:, None] * frequencies
    # The rotation is computed in the dtype of the tables, float32 at least.
    dtype = torch.promote_types(settings.dtype, torch.float32)
    return {"q": q, "k": k, "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def _drawn(shape: tuple[int, ...], settings: Settings, seed: int) -> Tensor:
    if settings.device.type == "meta":
        return torch.empty(shape, dtype=settings.dtype, device="meta")
    # Drawn on the device: a CPU takes minutes for billions of numbers.
    generator = torch.Generator(settings.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=settings.device).to(settings.dtype)
