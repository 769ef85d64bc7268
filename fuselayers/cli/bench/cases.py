"""The ops that `fuselayers bench` times: their inputs, and the same computation in plain PyTorch.

Legend of the shapes: x is [..., D]; for `rotary` it is [B, T, D], split into heads of 64 channels.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ...names import no_such
from ...ops import NormStyle

Outputs = Tensor | tuple[Tensor, ...]

_HEAD_DIM: Final = 64
# By style. "post" and "pre" write no second gradient for the residual: it is dx, or dy itself.
_FLOORS: Final[dict[NormStyle, tuple[float, float]]] = {"post": (4, 4), "pre": (4, 3), "prenorm": (4, 5)}
# The output width of a linear layer, as a multiple of its input width.
_EXPANSION: Final = 4


@dataclass(frozen=True)
class Settings:
    """How an op is called: the shape and dtype of x, the options. `bias` is for ops where a bias is optional."""

    shape: tuple[int, ...]
    dropout: float
    activation: str
    dtype: torch.dtype
    device: torch.device
    bias: bool = True
    style: NormStyle = "post"


@dataclass(frozen=True)
class OpCase:
    """One op with its inputs.

    Args:
        op: the library's function.
        plain: plain eager PyTorch with the same arguments.
        tensors: the arguments of both, by name; all distinct. Floating ones require gradients, except tables.
        options: the other arguments of both.
        floor: the least that forward and backward load and store, in tensors of the first one's size, as in the op's
            docstring; None for ops that memory bandwidth does not limit.
    """

    op: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    floor: tuple[float, float] | None = None

    @property
    def formula(self) -> Callable[..., Outputs]:
        """The library's function on its eager backend."""
        takes_backend = "backend" in inspect.signature(self.op).parameters
        return partial(self.op, backend="eager") if takes_backend else self.op


def op_case(name: str, settings: Settings) -> OpCase:
    """Return an op with inputs and options.

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
    """Return the same case in float64."""
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
    function, options = _activation(settings)
    return OpCase(ops.activate, lambda z, activation: function(z), _inputs(settings, "z"), options, (2, 3))


def _dropout(settings: Settings) -> OpCase:
    return OpCase(ops.dropout, lambda x, p: F.dropout(x, p), _inputs(settings, "x"), {"p": settings.dropout}, (2, 2))


def _bias_activation_dropout(settings: Settings) -> OpCase:
    function, options = _activation(settings)
    return OpCase(
        ops.bias_activation_dropout,
        lambda x, bias=None, *, activation, p: F.dropout(function(x if bias is None else x + bias), p),
        _inputs(settings, "x", *["bias"] * settings.bias),
        options | {"p": settings.dropout},
        (2, 3),
    )


def _bias_dropout_residual(settings: Settings) -> OpCase:
    return OpCase(
        ops.bias_dropout_residual,
        lambda x, residual, bias=None, *, p: F.dropout(x if bias is None else x + bias, p) + residual,
        _inputs(settings, "x", "residual", *["bias"] * settings.bias),
        {"p": settings.dropout},
        (3, 2),
    )


def _torch_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's layer norm; without a bias its RMS norm."""
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, 1e-6)
    return F.layer_norm(x, weight.shape, weight, bias)


def _bias_dropout_residual_norm(op: Callable[..., Outputs], *biases: str) -> Callable[[Settings], OpCase]:
    def plain(
        x: Tensor,
        residual: Tensor,
        bias: Tensor,
        weight: Tensor,
        norm_bias: Tensor | None = None,
        *,
        p: float,
        style: NormStyle,
    ) -> Outputs:
        dropped = F.dropout(x + bias, p)
        if style == "pre":
            return _torch_norm(dropped, weight, norm_bias) + residual
        total = dropped + residual
        y = _torch_norm(total, weight, norm_bias)
        return (y, total) if style == "prenorm" else y

    def case(settings: Settings) -> OpCase:
        tensors = _inputs(settings, "x", "residual", "bias", "weight", *biases)
        return OpCase(op, plain, tensors, {"p": settings.dropout, "style": settings.style}, _FLOORS[settings.style])

    return case


def _residual_norm(op: Callable[..., Outputs], *biases: str) -> Callable[[Settings], OpCase]:
    def plain(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x + residual
        return _torch_norm(total, weight, bias), total

    return lambda settings: OpCase(op, plain, _inputs(settings, "x", "residual", "weight", *biases), {}, (4, 4))


def _norm(op: Callable[..., Outputs], *biases: str) -> Callable[[Settings], OpCase]:
    return lambda settings: OpCase(op, _torch_norm, _inputs(settings, "x", "weight", *biases), {}, (2, 3))


def _gated_activation(settings: Settings) -> OpCase:
    function, options = _activation(settings)
    tensors = _inputs(settings, "gate", "up")
    return OpCase(ops.gated_activation, lambda gate, up, activation: function(gate) * up, tensors, options, (3, 5))


def _rotary(settings: Settings) -> OpCase:
    if len(settings.shape) != 3 or settings.shape[-1] % _HEAD_DIM:
        raise ValueError(
            f"rotary needs a shape BATCHxTOKENSxWIDTH whose width is a multiple of {_HEAD_DIM} (a head), "
            f"got {'x'.join(map(str, settings.shape))}"
        )
    batch, length, width = settings.shape
    # As a projection returns them: the heads of a token side by side.
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

    tables = {"cos": angles.cos().to(table_dtype), "sin": angles.sin().to(table_dtype)}
    return OpCase(ops.rotary, plain, {"q": q, "k": k, **tables}, {}, (4, 4))


def _cross_entropy(settings: Settings) -> OpCase:
    tensors = _inputs(settings, "logits") | {"target": _targets(settings, settings.shape[-1])}
    return OpCase(
        ops.cross_entropy,
        lambda logits, target: F.cross_entropy(logits.flatten(0, -2), target.flatten()),
        tensors,
        {},
        (1, 2),
    )


def _linear_cross_entropy(settings: Settings) -> OpCase:
    target = _targets(settings, _EXPANSION * settings.shape[-1])
    return OpCase(
        ops.linear_cross_entropy,
        lambda x, weight, target: F.cross_entropy(F.linear(x, weight).flatten(0, -2), target.flatten()),
        _inputs(settings, "x") | {"weight": _matrix(settings), "target": target},
        {},
    )


OPS: Final[dict[str, Callable[[Settings], OpCase]]] = {
    "activate": _activate,
    "bias_activation_dropout": _bias_activation_dropout,
    "bias_dropout_residual": _bias_dropout_residual,
    "bias_dropout_residual_layer_norm": _bias_dropout_residual_norm(ops.bias_dropout_residual_layer_norm, "norm_bias"),
    "bias_dropout_residual_rms_norm": _bias_dropout_residual_norm(ops.bias_dropout_residual_rms_norm),
    "cross_entropy": _cross_entropy,
    "dropout": _dropout,
    "gated_activation": _gated_activation,
    "layer_norm": _norm(ops.layer_norm, "bias"),
    "linear_cross_entropy": _linear_cross_entropy,
    "residual_layer_norm": _residual_norm(ops.residual_layer_norm, "bias"),
    "residual_rms_norm": _residual_norm(ops.residual_rms_norm),
    "rms_norm": _norm(ops.rms_norm),
    "rotary": _rotary,
}


def _activation(settings: Settings) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """torch's function, and the option of the op."""
    return ops.ACTIVATIONS[settings.activation], {"activation": settings.activation}


def _inputs(settings: Settings, *names: str) -> dict[str, Tensor]:
    """One random tensor for each name: [D] for weights and biases, else of the shape of x."""
    shapes = {
        name: settings.shape[-1:] if name in ("weight", "bias", "norm_bias") else settings.shape for name in names
    }
    return {name: _drawn(shape, settings, seed).requires_grad_() for seed, (name, shape) in enumerate(shapes.items())}


def _matrix(settings: Settings) -> Tensor:
    """A weight [4 D, D] that keeps a variance of one."""
    width = settings.shape[-1]
    return (_drawn((_EXPANSION * width, width), settings, 7) / math.sqrt(width)).requires_grad_()


def _drawn(shape: tuple[int, ...], settings: Settings, seed: int) -> Tensor:
    if settings.device.type == "meta":
        return torch.empty(shape, dtype=settings.dtype, device="meta")
    # On the device: a CPU draws billions of numbers in minutes.
    generator = torch.Generator(settings.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=settings.device).to(settings.dtype)


def _targets(settings: Settings, classes: int) -> Tensor:
    target = torch.randint(classes, settings.shape[:-1], generator=torch.Generator().manual_seed(9))
    return target.to(settings.device)
