"""Every op that has kernels, in the form in which `tests/ops/contract.py` takes it: tensors first, one reference."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
        shapes: of its tensors, for the shape of the first; for some shapes of the first there may be none.
        options: as given to both.
        kept: what its kernels keep for backward, in tensors of the first one's size, beside numbers per row and a seed.
    """

    op: Callable[..., Any]
    reference: Callable[..., Any]
    shapes: Callable[[Shape], list[Shape]]
    kept: int
    options: dict[str, Any] = field(default_factory=dict)


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
    """`fn` with its keyword tensors by position, after x."""

    def call(x: Tensor, *tensors: Tensor, **options: Any) -> Any:
        return fn(x, **dict(zip(names, tensors, strict=True)), **options)

    return call


def _norm_case(
    fn: Callable[..., Any], reference: Callable[..., Any], *names: str, kept: int = 1, **options: Any
) -> Case:
    def shapes(shape: Shape) -> list[Shape]:
        return [shape, *(shape if name == "residual" else shape[-1:] for name in names)]

    # A larger eps than usual: a row of one, or of equal values, has no variance to divide by.
    return Case(_norm(fn, *names), _norm(reference, *names), shapes, kept, {"eps": 1e-2, **options})


DROPPING = {"p": 0.3, "seed": seed_of()}


def _with_bias(shape: Shape) -> list[Shape]:
    return [shape, shape[-1:]]


CASES: dict[str, Case] = {
    "dropout": Case(_dropout, _dropout_reference, lambda shape: [shape], 0, DROPPING),
    **{
        f"bias_activation_dropout, {activation}": Case(
            ops.bias_activation_dropout,
            bias_activation_dropout_reference,
            _with_bias,
            int(activation is not None),
            {"activation": activation, **DROPPING},
        )
        for activation in (*ops.ACTIVATIONS, None)
    },
    "bias_activation": Case(
        ops.bias_activation_dropout, bias_activation_dropout_reference, _with_bias, 1, {"activation": "gelu"}
    ),
    "activation_dropout": Case(
        ops.bias_activation_dropout,
        bias_activation_dropout_reference,
        lambda shape: [shape],
        1,
        {"activation": "silu", **DROPPING},
    ),
    "bias_dropout_residual": Case(
        _bias_dropout_residual,
        _bias_dropout_residual_reference,
        lambda shape: [shape, shape, shape[-1:]],
        0,
        DROPPING,
    ),
    "bias_residual": Case(
        _bias_dropout_residual, _bias_dropout_residual_reference, lambda shape: [shape, shape, shape[-1:]], 0
    ),
    "dropout_residual": Case(
        _bias_dropout_residual, _bias_dropout_residual_reference, lambda shape: [shape, shape], 0, DROPPING
    ),
    **{
        f"gated_activation, {activation}": Case(
            ops.gated_activation,
            gated_activation_reference,
            lambda shape: [shape, shape],
            2,
            {"activation": activation},
        )
        for activation in ("silu", "gelu", "relu", None)
    },
    "layer_norm": _norm_case(ops.layer_norm, layer_norm_reference, "weight", "bias"),
    "layer_norm, no bias": _norm_case(ops.layer_norm, layer_norm_reference, "weight"),
    "rms_norm": _norm_case(ops.rms_norm, rms_norm_reference, "weight"),
    "residual_layer_norm": _norm_case(
        ops.residual_layer_norm, residual_layer_norm_reference, "residual", "weight", "bias"
    ),
    "residual_rms_norm": _norm_case(ops.residual_rms_norm, residual_rms_norm_reference, "residual", "weight"),
    **{
        f"bias_dropout_residual_layer_norm, {style}": _norm_case(
            ops.bias_dropout_residual_layer_norm,
            bias_dropout_residual_layer_norm_reference,
            *("residual", "weight", "norm_bias", "bias"),
            style=style,
            **DROPPING,
        )
        for style in ("post", "pre", "prenorm")
    },
    **{
        f"bias_dropout_residual_rms_norm, {style}": _norm_case(
            ops.bias_dropout_residual_rms_norm,
            bias_dropout_residual_rms_norm_reference,
            *("residual", "weight", "bias"),
            style=style,
            **DROPPING,
        )
        for style in ("post", "pre", "prenorm")
    },
    "residual_rms_norm, pre without dropout": _norm_case(
        ops.bias_dropout_residual_rms_norm,
        bias_dropout_residual_rms_norm_reference,
        *("residual", "weight"),
        style="pre",
    ),
    "gated_activation, packed": Case(
        _packed, _packed_reference, lambda shape: [(*shape[:-1], 2 * shape[-1])], 1, {"activation": "silu"}
    ),
}
