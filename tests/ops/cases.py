"""Every op that has kernels, in the form in which `tests/ops/contract.py` takes it: tensors first, one reference."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fuselayers import ops
from fuselayers.ops.bias_activation_dropout import bias_activation_dropout_reference
from fuselayers.ops.bias_dropout_residual import bias_dropout_residual_reference
from fuselayers.ops.dropout import dropout_reference
from fuselayers.ops.gated_activation import gated_activation_reference
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
    "gated_activation, packed": Case(
        _packed, _packed_reference, lambda shape: [(*shape[:-1], 2 * shape[-1])], 1, {"activation": "silu"}
    ),
}
