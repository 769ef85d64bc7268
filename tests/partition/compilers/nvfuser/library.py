"""The library's ops, each in one configuration with all that it can do, for the tests of the nvFuser backend.

On a CPU a mask of dropout is an op of the library's, which no fuser looks into; on a GPU it is a formula in the graph.
`as_on_a_gpu` makes the ops choose what they choose there. What that verifies is the graph that nvFuser gets, how it is
cut and translated, and that the definitions compute the op; not the kernels, which only a GPU and nvFuser make.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.ops import philox
from fuselayers.partition.compilers.nvfuser import definitions
from fuselayers.partition.compilers.nvfuser.translate import Layout, layout_of
from tests.partition.compilers.nvfuser.fusion_definition import StandIn

__all__ = ["CASES", "GOLDEN", "ON_FILE", "Case", "as_on_a_gpu"]

SEED = 7
ROWS = 6
# With a group of the mask's that is cut off, and without one, as goldens have it.
COLUMNS, WHOLE_GROUPS = 20, 24


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

    @property
    def drops(self) -> bool:
        """Whether it has a seed."""
        return self.rest is _seed

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        drawn = (torch.randn(shape, generator=generator) for shape in self.shapes)
        return (*(one.to(dtype).requires_grad_() for one in drawn), *self.rest())


def _seed() -> tuple[Tensor, ...]:
    return (torch.tensor(SEED),)


def as_on_a_gpu(stand_in: StandIn, patch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors be taken for a GPU's: by dropout, which then makes its masks of a formula, and by the backend and
    its stand-in, to which a seed is a tensor on the device like any other."""
    made = philox.keep_bytes
    # The function as it is, but for the word that it compares a device's type with.
    assert "cpu" in made.__code__.co_consts
    words = tuple("no device" if one == "cpu" else one for one in made.__code__.co_consts)
    by_formula = FunctionType(made.__code__.replace(co_consts=words), made.__globals__, made.__name__)
    by_formula.__kwdefaults__ = made.__kwdefaults__
    # Not by attributes: `ops.dropout` is the function.
    for module in (philox, importlib.import_module("fuselayers.ops.dropout")):
        patch.setattr(module, "keep_bytes", by_formula)

    def layout_on_a_gpu(inputs: Sequence[Any]) -> Layout:
        return tuple(one and dataclasses.replace(one, on_cpu=False) for one in layout_of(inputs))

    patch.setattr(definitions, "layout_of", layout_on_a_gpu)
    patch.setattr(stand_in, "scalars_pretend", True)


def _cases(columns: int) -> dict[str, Case]:
    rows_of, vector = (ROWS, columns), (columns,)

    def targets() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(2)
        return (torch.randint(0, columns, (ROWS,), generator=generator),)

    return {
        **{
            f"bias_activation_dropout-{activation}": Case(
                lambda x, bias, seed, activation=activation: ops.bias_activation_dropout(
                    x, bias, activation=activation, p=0.25, seed=seed
                ),
                (rows_of, vector),
                _seed,
            )
            for activation in ops.ACTIVATIONS
        },
        "bias_dropout_residual": Case(
            lambda x, residual, bias, seed: ops.bias_dropout_residual(x, residual, bias=bias, p=0.25, seed=seed),
            (rows_of, rows_of, vector),
            _seed,
        ),
        **{
            f"bias_dropout_residual_layer_norm-{style}": Case(
                lambda x, residual, weight, norm_bias, bias, seed, style=style: ops.bias_dropout_residual_layer_norm(
                    x, residual, weight=weight, norm_bias=norm_bias, bias=bias, p=0.25, style=style, seed=seed
                ),
                (rows_of, rows_of, vector, vector, vector),
                _seed,
            )
            for style in ("post", "pre", "prenorm")
        },
        **{
            f"bias_dropout_residual_rms_norm-{style}": Case(
                lambda x, residual, weight, bias, seed, style=style: ops.bias_dropout_residual_rms_norm(
                    x, residual, weight=weight, bias=bias, p=0.25, style=style, seed=seed
                ),
                (rows_of, rows_of, vector, vector),
                _seed,
            )
            for style in ("post", "pre", "prenorm")
        },
        "cross_entropy": Case(
            lambda logits, target: ops.cross_entropy(logits, target, label_smoothing=0.1, z_loss=0.01),
            (rows_of,),
            targets,
            (2, 2),
        ),
        "dropout": Case(lambda x, seed: ops.dropout(x, 0.25, seed=seed), (rows_of,), _seed),
        "gated_activation": Case(lambda gate, up: ops.gated_activation(gate, up), (rows_of, rows_of)),
        "gated_activation-packed": Case(lambda gate: ops.gated_activation(gate, activation="gelu"), (rows_of,)),
        "layer_norm": Case(
            lambda x, weight, bias: ops.layer_norm(x, weight=weight, bias=bias), (rows_of, vector, vector)
        ),
        "linear_activation": Case(
            lambda x, weight, bias: ops.linear_activation(x, weight, bias, activation="gelu"),
            (rows_of, (8, columns), (8,)),
        ),
        "linear_cross_entropy": Case(
            # An op of its own, whose chunks of logits are never all in memory.
            lambda x, weight, target: ops.linear_cross_entropy(x, weight, target),
            ((ROWS, 8), (columns, 8)),
            targets,
            regions=(0, 0),
        ),
        "residual_layer_norm": Case(
            lambda x, residual, weight, bias: ops.residual_layer_norm(x, residual, weight=weight, bias=bias),
            (rows_of, rows_of, vector, vector),
        ),
        "residual_rms_norm": Case(
            lambda x, residual, weight: ops.residual_rms_norm(x, residual, weight=weight), (rows_of, rows_of, vector)
        ),
        "rms_norm": Case(lambda x, weight: ops.rms_norm(x, weight=weight), (rows_of, vector)),
        "rotary": Case(
            lambda q, k, cos, sin: ops.rotary(q, k, cos, sin),
            ((2, 3, 5, 8), (2, 3, 5, 8)),
            lambda: (torch.linspace(0, 1, 20).view(5, 4).cos(), torch.linspace(0, 1, 20).view(5, 4).sin()),
            regions=(2, 2),
        ),
        "softmax": Case(lambda scores: ops.softmax(scores, causal=True, scale=0.5), ((2, 6, 6),)),
    }


CASES = _cases(COLUMNS)

ON_FILE = (
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
    "dropout",
)
GOLDEN = {name.partition("-")[0]: case for name, case in _cases(WHOLE_GROUPS).items() if name in ON_FILE}
"""The ops whose definitions are kept as files, each in one configuration, by the file's name."""
