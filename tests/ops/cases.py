"""Every op with kernels, and its reference, as functions that take their tensors first."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from fuselayers import ops
from fuselayers.ops.gated_activation import gated_activation_reference
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


def _case(op: str, *names: str, saved: float, floor: tuple[float, float], **options: Any) -> Case:
    """Return the case of an op, by its name, with the tensors `names` after the first."""

    def shapes(shape: Shape) -> list[Shape]:
        return [shape, *(shape if name in ("residual", "up") else shape[-1:] for name in names)]

    def by_position(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, *tensors: Tensor, **options: Any) -> Any:
            return fn(x, **dict(zip(names, tensors, strict=True)), **options)

        return call

    reference = getattr(sys.modules[f"fuselayers.ops.{op}"], f"{op}_reference")
    return Case(by_position(getattr(ops, op)), by_position(reference), shapes, saved, options, floor=floor)


def _norm_case(op: str, *names: str, floor: tuple[float, float], **options: Any) -> Case:
    # A larger eps than usual, since a row of one value, or of equal values, has no variance.
    return _case(op, *names, saved=1, floor=floor, eps=1e-2, **options)


def _packed_reference(packed: Tensor, **options: Any) -> Tensor:
    return gated_activation_reference(*packed.chunk(2, dim=-1), **options)


DROPPING = {"p": 0.3, "seed": seed_of()}
# Forward reads x and residual, writes y and s. Backward reads dy and s, writes dx, and dresidual unless it is dy;
# "prenorm" also reads the incoming gradient of s.
FLOORS_OF_STYLES: dict[str, tuple[float, float]] = {"post": (4, 4), "pre": (4, 3), "prenorm": (4, 5)}

CASES: dict[str, Case] = {
    "dropout": _case("dropout", saved=0, floor=(2, 2), **DROPPING),
    **{
        f"bias_activation_dropout, {activation}": _case(
            *("bias_activation_dropout", "bias"),
            saved=int(activation is not None),
            floor=(2, 2 if activation is None else 3),
            activation=activation,
            **DROPPING,
        )
        for activation in (*ops.ACTIVATIONS, None)
    },
    "bias_activation": _case("bias_activation_dropout", "bias", saved=1, floor=(2, 3), activation="gelu"),
    # Without dropout dx is dy and is not written; torch sums it for the bias.
    "bias": _case("bias_activation_dropout", "bias", saved=0, floor=(2, 0)),
    "activation_dropout": _case("bias_activation_dropout", saved=1, floor=(2, 3), activation="silu", **DROPPING),
    "bias_dropout_residual": _case(*("bias_dropout_residual", "residual", "bias"), saved=0, floor=(3, 2), **DROPPING),
    "bias_residual": _case("bias_dropout_residual", "residual", "bias", saved=0, floor=(3, 0)),
    "dropout_residual": _case("bias_dropout_residual", "residual", saved=0, floor=(3, 2), **DROPPING),
    **{
        f"gated_activation, {activation}": _case("gated_activation", "up", saved=2, floor=(3, 5), activation=activation)
        for activation in ("silu", "gelu", "relu", "sigmoid", None)
    },
    "layer_norm": _norm_case("layer_norm", "weight", "bias", floor=(2, 3)),
    "layer_norm, no bias": _norm_case("layer_norm", "weight", floor=(2, 3)),
    "rms_norm": _norm_case("rms_norm", "weight", floor=(2, 3)),
    "residual_layer_norm": _norm_case("residual_layer_norm", "residual", "weight", "bias", floor=(4, 4)),
    "residual_rms_norm": _norm_case("residual_rms_norm", "residual", "weight", floor=(4, 4)),
    **{
        f"{op}, {style}": _norm_case(op, *names, style=style, floor=floor, **DROPPING)
        for op, names in (
            ("bias_dropout_residual_layer_norm", ("residual", "weight", "norm_bias", "bias")),
            ("bias_dropout_residual_rms_norm", ("residual", "weight", "bias")),
        )
        for style, floor in FLOORS_OF_STYLES.items()
    },
    "residual_rms_norm, pre without dropout": _norm_case(
        "bias_dropout_residual_rms_norm", "residual", "weight", style="pre", floor=(3, 3)
    ),
    "gated_activation, packed": Case(
        ops.gated_activation,
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
