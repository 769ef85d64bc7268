"""Every op with kernels, and its reference, as functions that take their tensors first."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from fuselayers import ops
from fuselayers.ops.bias_activation_dropout import bias_activation_dropout_reference
from fuselayers.ops.bias_dropout_residual import bias_dropout_residual_reference
from fuselayers.ops.bias_dropout_residual_layer_norm import bias_dropout_residual_layer_norm_reference
from fuselayers.ops.bias_dropout_residual_rms_norm import bias_dropout_residual_rms_norm_reference
from fuselayers.ops.dropout import dropout_reference
from fuselayers.ops.gated_activation import gated_activation_reference
from fuselayers.ops.layer_norm import layer_norm_reference
from fuselayers.ops.residual_layer_norm import residual_layer_norm_reference
from fuselayers.ops.residual_rms_norm import residual_rms_norm_reference
from fuselayers.ops.rms_norm import rms_norm_reference
from tests.ops.contract import seed_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One op with one set of options.

    Attributes:
        op: takes tensors, the options, and `backend`.
        reference: takes the same tensors and options.
        shapes: the shapes of all tensors, given the shape of the first.
        saved: bytes that the kernels save for backward, per byte of the first tensor, without statistics per row and
            the seed.
        options: keyword arguments of op and reference.
        floor: elements that the kernels load and store, forward and backward, per element of the first tensor, as in
            the op's docstring, without statistics per row, vectors per program and the seed.
    """

    op: Callable[..., Any]
    reference: Callable[..., Any]
    shapes: Callable[[Shape], list[Shape]]
    saved: float
    options: dict[str, Any] = field(default_factory=dict)
    floor: tuple[float, float] = field(kw_only=True)


def _dropout(x: Tensor, *, p: float, seed: Tensor, **options: Any) -> Tensor:
    return ops.dropout(x, p, seed=seed, **options)


def _dropout_reference(x: Tensor, *, p: float, seed: Tensor) -> Tensor:
    return dropout_reference(x, p, seed=seed)


def _bias_dropout_residual(x: Tensor, residual: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return ops.bias_dropout_residual(x, residual, bias=bias, **options)


def _bias_dropout_residual_reference(x: Tensor, residual: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return bias_dropout_residual_reference(x, residual, bias=bias, **options)


def _packed(packed: Tensor, **options: Any) -> Tensor:
    return ops.gated_activation(packed, **options)


def _packed_reference(packed: Tensor, **options: Any) -> Tensor:
    return gated_activation_reference(*packed.chunk(2, dim=-1), **options)


def _norm(fn: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Return `fn` with its keyword tensors by position, after x."""

    def call(x: Tensor, *tensors: Tensor, **options: Any) -> Any:
        return fn(x, **dict(zip(names, tensors, strict=True)), **options)

    return call


def _norm_case(
    fn: Callable[..., Any], reference: Callable[..., Any], *names: str, floor: tuple[float, float], **options: Any
) -> Case:
    def shapes(shape: Shape) -> list[Shape]:
        return [shape, *(shape if name == "residual" else shape[-1:] for name in names)]

    # A larger eps than usual, since a row of one value, or of equal values, has no variance.
    return Case(_norm(fn, *names), _norm(reference, *names), shapes, 1, {"eps": 1e-2, **options}, floor=floor)


DROPPING = {"p": 0.3, "seed": seed_of()}
# Forward reads x and residual, writes y and s. Backward reads dy and s, writes dx, and dresidual unless it is dy;
# "prenorm" also reads the incoming gradient of s.
FLOORS_OF_STYLES: dict[str, tuple[float, float]] = {"post": (4, 4), "pre": (4, 3), "prenorm": (4, 5)}


def _with_bias(shape: Shape) -> list[Shape]:
    return [shape, shape[-1:]]


CASES: dict[str, Case] = {
    "dropout": Case(_dropout, _dropout_reference, lambda shape: [shape], 0, DROPPING, floor=(2, 2)),
    **{
        f"bias_activation_dropout, {activation}": Case(
            ops.bias_activation_dropout,
            bias_activation_dropout_reference,
            _with_bias,
            int(activation is not None),
            {"activation": activation, **DROPPING},
            floor=(2, 2 if activation is None else 3),
        )
        for activation in (*ops.ACTIVATIONS, None)
    },
    "bias_activation": Case(
        ops.bias_activation_dropout,
        bias_activation_dropout_reference,
        _with_bias,
        1,
        {"activation": "gelu"},
        floor=(2, 3),
    ),
    # Without dropout dx is dy and is not written; torch sums it for the bias.
    "bias": Case(ops.bias_activation_dropout, bias_activation_dropout_reference, _with_bias, 0, floor=(2, 0)),
    "activation_dropout": Case(
        ops.bias_activation_dropout,
        bias_activation_dropout_reference,
        lambda shape: [shape],
        1,
        {"activation": "silu", **DROPPING},
        floor=(2, 3),
    ),
    "bias_dropout_residual": Case(
        _bias_dropout_residual,
        _bias_dropout_residual_reference,
        lambda shape: [shape, shape, shape[-1:]],
        0,
        DROPPING,
        floor=(3, 2),
    ),
    "bias_residual": Case(
        _bias_dropout_residual,
        _bias_dropout_residual_reference,
        lambda shape: [shape, shape, shape[-1:]],
        0,
        floor=(3, 0),
    ),
    "dropout_residual": Case(
        _bias_dropout_residual,
        _bias_dropout_residual_reference,
        lambda shape: [shape, shape],
        0,
        DROPPING,
        floor=(3, 2),
    ),
    **{
        f"gated_activation, {activation}": Case(
            ops.gated_activation,
            gated_activation_reference,
            lambda shape: [shape, shape],
            2,
            {"activation": activation},
            floor=(3, 5),
        )
        for activation in ("silu", "gelu", "relu", "sigmoid", None)
    },
    "layer_norm": _norm_case(ops.layer_norm, layer_norm_reference, "weight", "bias", floor=(2, 3)),
    "layer_norm, no bias": _norm_case(ops.layer_norm, layer_norm_reference, "weight", floor=(2, 3)),
    "rms_norm": _norm_case(ops.rms_norm, rms_norm_reference, "weight", floor=(2, 3)),
    "residual_layer_norm": _norm_case(
        ops.residual_layer_norm, residual_layer_norm_reference, "residual", "weight", "bias", floor=(4, 4)
    ),
    "residual_rms_norm": _norm_case(
        ops.residual_rms_norm, residual_rms_norm_reference, "residual", "weight", floor=(4, 4)
    ),
    **{
        f"bias_dropout_residual_layer_norm, {style}": _norm_case(
            ops.bias_dropout_residual_layer_norm,
            bias_dropout_residual_layer_norm_reference,
            *("residual", "weight", "norm_bias", "bias"),
            style=style,
            floor=FLOORS_OF_STYLES[style],
            **DROPPING,
        )
        for style in FLOORS_OF_STYLES
    },
    **{
        f"bias_dropout_residual_rms_norm, {style}": _norm_case(
            ops.bias_dropout_residual_rms_norm,
            bias_dropout_residual_rms_norm_reference,
            *("residual", "weight", "bias"),
            style=style,
            floor=FLOORS_OF_STYLES[style],
            **DROPPING,
        )
        for style in FLOORS_OF_STYLES
    },
    "residual_rms_norm, pre without dropout": _norm_case(
        ops.bias_dropout_residual_rms_norm,
        bias_dropout_residual_rms_norm_reference,
        *("residual", "weight"),
        style="pre",
        floor=(3, 3),
    ),
    "gated_activation, packed": Case(
        _packed,
        _packed_reference,
        lambda shape: [(*shape[:-1], 2 * shape[-1])],
        1,
        {"activation": "silu"},
        floor=(1.5, 2.5),
    ),
}

# For each op the case with the most options, and "bias", whose gradient is dy itself.
EVERY_DAY = (
    "dropout",
    "bias_activation_dropout, gelu",
    "bias",
    "bias_dropout_residual",
    "gated_activation, packed",
    "layer_norm",
    "rms_norm",
    "residual_layer_norm",
    "residual_rms_norm",
    "bias_dropout_residual_layer_norm, prenorm",
    "bias_dropout_residual_rms_norm, pre",
)


all_cases = pytest.mark.parametrize("case", list(CASES.values()), ids=CASES)
