"""Feedforwards that save the inputs and outputs of their first layers, and recompute the rest in backward.

x -> up -> activation -> dropout -> down          saved: x, up(x), and the seed of the dropout
x -> gate, up -> activation(gate) * up -> down    saved: x, gate(x), up(x)
x -> dense -> activation -> norm                  saved: x, dense(x)
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .... import ops
from ...._torch.dispatch import is_compiling
from ....module_class import unchanged_class
from ..parts import (
    is_activation,
    is_dropout,
    is_flag,
    is_identity,
    is_layer_norm,
    is_linear,
    is_number,
)
from ..recomputed import linear_of_recomputed, recomputed_in_backward
from ..rule import Rule, Test
from .dropout import probability
from .linear import linear, weight_of

_Activation = Callable[[Tensor], Tensor]


def mlp(self: nn.Module, *, x: Tensor, up: nn.Module, activation: _Activation, **rest: Any) -> Tensor:
    """down(dropout(activation(up(x))))."""
    return _down((linear(x, up),), activation, **rest)


def gated_mlp(
    self: nn.Module, *, x: Tensor, gate: nn.Module, up: nn.Module, activation: _Activation, **rest: Any
) -> Tensor:
    """down(dropout(activation(gate(x)) * up(x)))."""
    return _down((linear(x, gate), linear(x, up)), functools.partial(_gated, activation), **rest)


def packed_gated_mlp(self: nn.Module, *, x: Tensor, gate_up: nn.Module, activation: _Activation, **rest: Any) -> Tensor:
    """down(activation(gate) * up) with one layer for gate and up."""
    return _down((linear(x, gate_up),), functools.partial(_packed, activation), **rest)


def _gated(activation: _Activation, gate: Tensor, up: Tensor) -> Tensor:
    # The op has its own backward. A compiler makes one kernel of the formula anyway.
    if not is_compiling() and _is_silu(activation) and gate.shape == up.shape and gate.dtype == up.dtype:
        return ops.gated_activation(gate, up, activation="silu")
    return activation(gate) * up


def _packed(activation: _Activation, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return activation(gate) * up


def _is_silu(activation: Any) -> bool:
    kind = unchanged_class(activation)
    return activation is F.silu or kind is nn.SiLU or f"{kind.__module__}.{kind.__name__}" == _SILU


_SILU: Final = "transformers.activations.SiLUActivation"


def _down(
    sources: Sequence[Tensor],
    hidden: Callable[..., Tensor],
    *,
    down: Any,
    inner: nn.Dropout | None = None,
    outer: nn.Dropout | None = None,
    inner_p: float = 0.0,
    outer_p: float = 0.0,
    middle: nn.Module | None = None,
    training: bool = False,
    cast: bool = False,
) -> Tensor:
    """outer(down(inner(hidden(*sources)))).

    Args:
        sources: tensors that are saved for backward.
        hidden: a function of the sources, recomputed in backward.
        down: the last layer.
        inner: dropout before the last layer.
        outer: dropout after the last layer.
        inner_p, outer_p, training: arguments of `F.dropout` where it is called in place of a layer.
        middle: an identity before the last layer.
        cast: whether the input of the last layer is cast to the weight's dtype.
    """
    p = inner_p * training if inner is None else probability(inner)
    weight = weight_of(down)
    seeds = (ops.draw_seed(device=sources[0].device),) if p else ()
    made = functools.partial(_hidden, hidden, p, weight.dtype if cast else None)
    y = linear_of_recomputed(made, (*sources, *seeds), weight, down.bias)
    return ops.dropout(y, outer_p * training if outer is None else probability(outer))


def _hidden(hidden: Callable[..., Tensor], p: float, dtype: torch.dtype | None, *tensors: Tensor) -> Tensor:
    """Return the input of the last layer. If `p` is above 0, the last tensor is dropout's seed."""
    if p:
        *sources, seed = tensors
        x = ops.dropout(hidden(*sources), p, seed=seed)
    else:
        x = hidden(*tensors)
    return x if dtype is None else x.to(dtype)


def dense_activation_norm(
    self: nn.Module, *, x: Tensor, dense: nn.Module, activation: _Activation, norm: nn.LayerNorm
) -> Tensor:
    """norm(activation(dense(x))), as in the head of BERT."""
    make = functools.partial(_activated_norm, activation, norm.eps)
    return recomputed_in_backward(make, linear(x, dense), norm.weight, *(() if norm.bias is None else (norm.bias,)))


def _activated_norm(
    activation: _Activation, eps: float, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return F.layer_norm(activation(x), weight.shape, weight, bias, eps)


_PARTS: Final[Mapping[str, Test]] = {
    **{"up": is_linear, "gate": is_linear, "gate_up": is_linear, "down": is_linear, "activation": is_activation},
    **{"inner": is_dropout, "outer": is_dropout, "middle": is_identity},
    **{"inner_p": is_number, "outer_p": is_number, "training": is_flag},
}

_T5: Final = """
def forward(self, x):
    x = self.inner({hidden})
    if (
        isinstance(self.down.weight, torch.Tensor)
        and x.dtype != self.down.weight.dtype
        and self.down.weight.dtype != torch.int8
    ):
        x = x.to(self.down.weight.dtype)
    return self.down(x)
"""

_WITH_LAYERS: Final[tuple[Rule, ...]] = (
    Rule(
        "gated_mlp",
        of=(
            "def forward(self, x): return self.down(self.activation(self.gate(x)) * self.up(x))",
            "def forward(self, x): return self.down(self.inner(self.activation(self.gate(x)) * self.up(x)))",
            "def forward(self, x): return self.outer(self.down(self.activation(self.gate(x)) * self.up(x)))",
        ),
        forward=gated_mlp,
        parts=_PARTS,
    ),
    Rule(
        "gated_mlp",
        of=(_T5.format(hidden="self.activation(self.gate(x)) * self.up(x)"),),
        forward=gated_mlp,
        parts=_PARTS,
        options={"cast": True},
    ),
    Rule(
        "packed_gated_mlp",
        of=(
            """
            def forward(self, x):
                gate, up = self.gate_up(x).chunk(2, dim=-1)
                return self.down(up * self.activation(gate))
            """,
            """
            def forward(self, x):
                gate, up = self.gate_up(x).chunk(2, dim=-1)
                return self.down(self.activation(gate) * up)
            """,
        ),
        forward=packed_gated_mlp,
        parts=_PARTS,
    ),
    Rule(
        "mlp",
        of=(
            "def forward(self, x): return self.down(self.activation(self.up(x)))",
            "def forward(self, x): return self.down(self.inner(self.activation(self.up(x))))",
            "def forward(self, x): return self.outer(self.down(self.activation(self.up(x))))",
            "def forward(self, x): return self.outer(self.down(self.inner(self.activation(self.up(x)))))",
            "def forward(self, x): return self.outer(self.down(self.middle(self.inner(self.activation(self.up(x))))))",
            """
            def forward(self, x):
                x = F.dropout(self.activation(self.up(x)), p=self.inner_p, training=self.training)
                return self.down(x)
            """,
            """
            def forward(self, x):
                x = F.dropout(self.activation(self.up(x)), p=self.inner_p, training=self.training)
                return F.dropout(self.down(x), p=self.outer_p, training=self.training)
            """,
        ),
        forward=mlp,
        parts=_PARTS,
    ),
    Rule(
        "mlp",
        of=(_T5.format(hidden="self.activation(self.up(x))"),),
        forward=mlp,
        parts=_PARTS,
        options={"cast": True},
    ),
    Rule(
        "dense_activation_norm",
        of=("def forward(self, x): return self.norm(self.activation(self.dense(x)))",),
        forward=dense_activation_norm,
        parts={"dense": is_linear, "activation": is_activation, "norm": is_layer_norm},
    ),
)


def _with_function(rule: Rule, activation: _Activation) -> Rule:
    """Return the rule for forwards that call a function in place of an activation layer."""
    assert not isinstance(rule.of, type)
    name = f"F.{activation.__name__}"
    of = tuple(source.replace("self.activation", name) for source in rule.of)
    return replace(rule, of=of, options={**rule.options, "activation": activation})


RULES: Final[tuple[Rule, ...]] = (
    *_WITH_LAYERS,
    *(_with_function(rule, activation) for rule in _WITH_LAYERS for activation in (F.gelu, F.relu, F.silu)),
)
"""Gated forms come first. If two forms look alike (dropout before or after the last layer), the parts' tests decide."""
