"""The library's ops, each in one configuration with all that it can do, for the tests of the nvFuser backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.ops import philox

__all__ = ["CASES", "GOLDEN", "Case", "drops_by_formula"]

SEED = 7
ROWS, COLUMNS = 6, 20


@dataclass(frozen=True)
class Case:
    """An op and what it is called with.

    Attributes:
        fn: the op, of tensors alone.
        shapes: of its floating inputs, each of which gets a gradient.
        rest: the other inputs.
        regions: how many regions nvFuser gets of its forward and its backward; the rest is left to torch.
    """

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    rest: Callable[[], tuple[Tensor, ...]] = tuple
    regions: tuple[int, int] = (1, 1)

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        drawn = (torch.randn(shape, generator=generator) for shape in self.shapes)
        return (*(one.to(dtype).requires_grad_() for one in drawn), *self.rest())


def _seed() -> tuple[Tensor, ...]:
    return (torch.tensor(SEED),)


def _targets() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    return (torch.randint(0, COLUMNS, (ROWS,), generator=generator),)


def drops_by_formula(x: Tensor, seed: Tensor) -> Tensor:
    """x, a quarter of it dropped, with the mask as a GPU gets it: ten rounds of Philox, in 64-bit integers."""
    rows, columns = x.shape
    row_R, group_G = torch.arange(rows, device=x.device), torch.arange(0, (columns + 7) // 8, device=x.device)
    lanes = philox._lanes(seed, row_R, group_G, torch.full_like(seed, 0))
    keep = torch.stack([lane >= philox.keep_threshold(0.25) for lane in lanes], dim=-1).flatten(1)
    return x * keep[:, :columns] * 2


_X = (ROWS, COLUMNS)
_V = (COLUMNS,)

CASES: dict[str, Case] = {
    **{
        f"bias_activation_dropout-{activation}": Case(
            lambda x, bias, seed, activation=activation: ops.bias_activation_dropout(
                x, bias, activation=activation, p=0.25, seed=seed
            ),
            (_X, _V),
            _seed,
        )
        for activation in ops.ACTIVATIONS
    },
    "bias_dropout_residual": Case(
        lambda x, residual, bias, seed: ops.bias_dropout_residual(x, residual, bias=bias, p=0.25, seed=seed),
        (_X, _X, _V),
        _seed,
    ),
    **{
        f"bias_dropout_residual_layer_norm-{style}": Case(
            lambda x, residual, weight, norm_bias, bias, seed, style=style: ops.bias_dropout_residual_layer_norm(
                x, residual, weight=weight, norm_bias=norm_bias, bias=bias, p=0.25, style=style, seed=seed
            ),
            (_X, _X, _V, _V, _V),
            _seed,
        )
        for style in ("post", "pre", "prenorm")
    },
    **{
        f"bias_dropout_residual_rms_norm-{style}": Case(
            lambda x, residual, weight, bias, seed, style=style: ops.bias_dropout_residual_rms_norm(
                x, residual, weight=weight, bias=bias, p=0.25, style=style, seed=seed
            ),
            (_X, _X, _V, _V),
            _seed,
        )
        for style in ("post", "pre", "prenorm")
    },
    "cross_entropy": Case(
        lambda logits, target: ops.cross_entropy(logits, target, label_smoothing=0.1, z_loss=0.01),
        (_X,),
        _targets,
        (2, 2),
    ),
    "dropout": Case(lambda x, seed: ops.dropout(x, 0.25, seed=seed), (_X,), _seed),
    "gated_activation": Case(lambda gate, up: ops.gated_activation(gate, up), (_X, _X)),
    "gated_activation-packed": Case(lambda gate: ops.gated_activation(gate, activation="gelu"), (_X,)),
    "layer_norm": Case(lambda x, weight, bias: ops.layer_norm(x, weight=weight, bias=bias), (_X, _V, _V)),
    "linear_activation": Case(
        lambda x, weight, bias: ops.linear_activation(x, weight, bias, activation="gelu"), (_X, (8, COLUMNS), (8,))
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
        (_X, _X, _V, _V),
    ),
    "residual_rms_norm": Case(
        lambda x, residual, weight: ops.residual_rms_norm(x, residual, weight=weight), (_X, _X, _V)
    ),
    "rms_norm": Case(lambda x, weight: ops.rms_norm(x, weight=weight), (_X, _V)),
    "rotary": Case(
        lambda q, k, cos, sin: ops.rotary(q, k, cos, sin),
        ((2, 3, 5, 8), (2, 3, 5, 8)),
        lambda: (torch.linspace(0, 1, 20).view(5, 4).cos(), torch.linspace(0, 1, 20).view(5, 4).sin()),
        regions=(2, 2),
    ),
    "softmax": Case(lambda scores: ops.softmax(scores, causal=True, scale=0.5), ((2, 6, 6),)),
}

GOLDEN: dict[str, Case] = {
    name.partition("-")[0]: CASES[name]
    for name in (
        "bias_activation_dropout-gelu",
        "bias_dropout_residual",
        "bias_dropout_residual_layer_norm-prenorm",
        "bias_dropout_residual_rms_norm-post",
        "cross_entropy",
        "gated_activation-packed",
        "linear_activation",
        "residual_layer_norm",
        "residual_rms_norm",
        "rotary",
        "softmax",
    )
} | {"mask": Case(drops_by_formula, (), lambda: (torch.linspace(-1, 1, 40).view(2, 20), *_seed()))}
"""The ops whose definitions are kept as files, each in one configuration, by the file's name."""
