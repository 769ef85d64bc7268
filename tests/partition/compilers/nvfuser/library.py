"""The library's ops with all their options, for the tests of the nvFuser backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselayers import ops

__all__ = ["CASES", "Case"]

SEED = 7
ROWS, COLUMNS = 6, 20  # the last of the mask's groups of eight columns is cut off


@dataclass(frozen=True)
class Case:
    """An op and its inputs.

    Attributes:
        fn: the op as a function of tensors.
        shapes: of its floating inputs, each of which gets a gradient.
        rest: makes the other inputs.
        regions: how many regions nvFuser runs in forward and in backward.
    """

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    rest: Callable[[], tuple[Tensor, ...]] = tuple
    regions: tuple[int, int] = (1, 1)

    @property
    def drops(self) -> bool:
        """Whether the op takes a seed."""
        return self.rest is _seed

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        drawn = (torch.randn(shape, generator=generator) for shape in self.shapes)
        return (*(one.to(dtype).requires_grad_() for one in drawn), *self.rest())


def _seed() -> tuple[Tensor, ...]:
    return (torch.tensor(SEED),)


def _targets() -> tuple[Tensor, ...]:
    return (torch.randint(0, COLUMNS, (ROWS,), generator=torch.Generator().manual_seed(2)),)


_MATRIX, _VECTOR = (ROWS, COLUMNS), (COLUMNS,)
CASES = {
    **{
        f"bias_activation_dropout-{activation}": Case(
            lambda x, bias, seed, activation=activation: ops.bias_activation_dropout(
                x, bias, activation=activation, p=0.25, seed=seed
            ),
            (_MATRIX, _VECTOR),
            _seed,
        )
        for activation in ops.ACTIVATIONS
    },
    "bias_dropout_residual": Case(
        lambda x, residual, bias, seed: ops.bias_dropout_residual(x, residual, bias=bias, p=0.25, seed=seed),
        (_MATRIX, _MATRIX, _VECTOR),
        _seed,
    ),
    **{
        f"bias_dropout_residual_layer_norm-{style}": Case(
            lambda x, residual, weight, norm_bias, bias, seed, style=style: ops.bias_dropout_residual_layer_norm(
                x, residual, weight=weight, norm_bias=norm_bias, bias=bias, p=0.25, style=style, seed=seed
            ),
            (_MATRIX, _MATRIX, _VECTOR, _VECTOR, _VECTOR),
            _seed,
        )
        for style in ("post", "pre", "prenorm")
    },
    **{
        f"bias_dropout_residual_rms_norm-{style}": Case(
            lambda x, residual, weight, bias, seed, style=style: ops.bias_dropout_residual_rms_norm(
                x, residual, weight=weight, bias=bias, p=0.25, style=style, seed=seed
            ),
            (_MATRIX, _MATRIX, _VECTOR, _VECTOR),
            _seed,
        )
        for style in ("post", "pre", "prenorm")
    },
    "cross_entropy": Case(
        lambda logits, target: ops.cross_entropy(logits, target, label_smoothing=0.1, z_loss=0.01),
        (_MATRIX,),
        _targets,
        (2, 2),
    ),
    "dropout": Case(lambda x, seed: ops.dropout(x, 0.25, seed=seed), (_MATRIX,), _seed),
    "gated_activation": Case(lambda gate, up: ops.gated_activation(gate, up), (_MATRIX, _MATRIX)),
    "gated_activation-packed": Case(lambda gate: ops.gated_activation(gate, activation="gelu"), (_MATRIX,)),
    "layer_norm": Case(
        lambda x, weight, bias: ops.layer_norm(x, weight=weight, bias=bias), (_MATRIX, _VECTOR, _VECTOR)
    ),
    "linear_activation": Case(
        lambda x, weight, bias: ops.linear_activation(x, weight, bias, activation="gelu"),
        (_MATRIX, (8, COLUMNS), (8,)),
    ),
    "linear_cross_entropy": Case(
        # An op of its own, whose chunks of logits are never all in memory.
        lambda x, weight, target: ops.linear_cross_entropy(x, weight, target),
        ((ROWS, 8), (COLUMNS, 8)),
        _targets,
        regions=(0, 0),
    ),
    "residual_layer_norm": Case(
        lambda x, residual, weight, bias: ops.residual_layer_norm(x, residual, weight=weight, bias=bias),
        (_MATRIX, _MATRIX, _VECTOR, _VECTOR),
    ),
    "residual_rms_norm": Case(
        lambda x, residual, weight: ops.residual_rms_norm(x, residual, weight=weight), (_MATRIX, _MATRIX, _VECTOR)
    ),
    "rms_norm": Case(lambda x, weight: ops.rms_norm(x, weight=weight), (_MATRIX, _VECTOR)),
    "rotary": Case(
        lambda q, k, cos, sin: ops.rotary(q, k, cos, sin),
        ((2, 3, 5, 8), (2, 3, 5, 8)),
        lambda: (torch.linspace(0, 1, 20).view(5, 4).cos(), torch.linspace(0, 1, 20).view(5, 4).sin()),
        regions=(2, 2),
    ),
    "softmax": Case(lambda scores: ops.softmax(scores, causal=True, scale=0.5), ((2, 6, 6),)),
}
