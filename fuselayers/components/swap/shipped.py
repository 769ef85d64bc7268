"""The rules that are shipped."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from . import functions
from .attention import attention_function
from .rules import Rule
from .slots import (
    drops,
    is_activation,
    is_dropout,
    is_false,
    is_flag,
    is_last,
    is_layer_norm,
    is_layer_norm_or_nothing,
    is_linear,
    is_number,
    is_parameter,
)

__all__ = ["RULES"]

_Slots = dict[str, Callable[[Any], bool]]

_INNER: Final[_Slots] = {"inner": is_dropout, "inner_p": is_number, "inner_training": is_flag}
_DROP: Final[_Slots] = {"drop": is_dropout, "drop_p": is_number, "drop_training": is_flag}
_ACTIVATED: Final[_Slots] = {
    "activation": is_activation,
    "middle": is_layer_norm_or_nothing,
    "down": is_linear,
    **_INNER,
}
_PACKED: Final[_Slots] = {"gate_up": is_linear, "dim": is_last, **_ACTIVATED}
_OF_RMS_NORM: Final[_Slots] = {"weight": is_parameter, "eps": is_number}


def _dropouts(value: str, name: str) -> tuple[str, ...]:
    """The ways to drop elements of a value: by a layer, or by a function."""
    return (
        f"{name}({value})",
        f"F.dropout({value}, p={name}_p, training={name}_training)",
        f"F.dropout({value}, {name}_p, {name}_training)",
        f"F.dropout({value}, {name}_p, training={name}_training)",
    )


def _with_down(hidden: str, before: str = "") -> tuple[str, ...]:
    """The last layer of an MLP, with and without dropout and a norm before it."""
    return tuple(f"{before}\ny = down({form})" for form in _before_down(hidden))


def _of_halves(hidden: str) -> tuple[str, ...]:
    """The same for one layer that makes both gate and up; timm keeps the dimension in an attribute."""
    halves = ("-1", "dim")
    return tuple(
        form for dim in halves for form in _with_down(hidden, f"first, second = gate_up(x).chunk(2, dim={dim})")
    )


def _with_cast(hidden: str) -> tuple[str, ...]:
    """The same with the cast that T5 has before its last layer."""
    return tuple(f"y = down(as_weight({form}, down))" for form in _before_down(hidden))


def _before_down(hidden: str) -> list[str]:
    forms = (*_dropouts(hidden, "inner"), hidden)
    return [*(f"middle({form})" for form in forms), *forms]


_MLPS: Final[tuple[tuple[str, Callable[..., Any], _Slots, tuple[str, ...]], ...]] = (
    (
        "gated_mlp",
        functions.gated_mlp,
        {"gate": is_linear, "up": is_linear, **_ACTIVATED},
        _with_down("activation(gate(x)) * up(x)"),
    ),
    (
        "packed_gated_mlp",
        functions.packed_gated_mlp,
        _PACKED,
        _of_halves("second * activation(first)"),
    ),
    (
        "packed_gated_mlp",
        functools.partial(functions.packed_gated_mlp, gate_first=False),
        _PACKED,
        _of_halves("first * activation(second)"),
    ),
    ("mlp", functions.mlp, {"up": is_linear, **_ACTIVATED}, _with_down("activation(up(x))")),
    (
        "gated_mlp",
        functools.partial(functions.gated_mlp, cast=True),
        {"gate": is_linear, "up": is_linear, **_ACTIVATED},
        _with_cast("activation(gate(x)) * up(x)"),
    ),
    (
        "mlp",
        functools.partial(functions.mlp, cast=True),
        {"up": is_linear, **_ACTIVATED},
        _with_cast("activation(up(x))"),
    ),
)
"""Name, function, slots and patterns of the MLPs; each reads x and makes y."""

_RMS_NORM: Final = """
f = x.to(torch.float32)
y = weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
"""

_RMS_NORMS: Final[tuple[tuple[str, functions.Normalise, str], ...]] = (
    ("rms_norm", functions.of_rms_norm, _RMS_NORM),
    (
        "rms_norm",
        functions.of_rms_norm_as_x,
        """
        f = x.to(torch.float32)
        y = (weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)
        """,
    ),
    (
        "rms_norm_from_one",
        functions.of_rms_norm_from_one,
        """
        f = x.float()
        y = (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).type_as(x)
        """,
    ),
    (
        "wide_rms_norm",
        functions.of_wide_rms_norm,
        """
        y = weight * as_half(x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps), weight)
        """,
    ),
)
"""Name, function and pattern of the RMS norms; each reads x and makes y."""


def _rule(
    name: str,
    replacement: Callable[..., Any],
    *patterns: str,
    slots: Mapping[str, Callable[[Any], bool]],
    inputs: tuple[str, ...] = ("x", "residual"),
    results: tuple[str, ...] = ("y",),
) -> Rule:
    return Rule(name, patterns, inputs, results, replacement, slots)


RULES: Final = (
    *(_rule(name, function, *patterns, slots=slots, inputs=("x",)) for name, function, slots, patterns in _MLPS),
    Rule(
        "attention_dropout",
        patterns=("y = functions.get_interface(name, default)",),
        inputs=("functions", "name", "default"),
        results=("y",),
        replacement=attention_function,
        applies=drops,
        one_op=True,
    ),
    _rule(
        "dropout_residual_norm",
        functions.dropout_residual_norm,
        *(f"s = {form} + residual\ny = norm(s)" for form in _dropouts("x", "drop")),
        slots={**_DROP, "norm": is_layer_norm},
        results=("y", "s"),
    ),
    _rule(
        "residual_norm",
        functions.dropout_residual_norm,
        "s = x + residual\ny = norm(s)",
        slots={"norm": is_layer_norm},
        results=("y", "s"),
    ),
    _rule(
        "residual_rms_norm",
        functions.residual_rms_norm,
        "s = x + residual\nx = s\n" + _RMS_NORM,
        slots=_OF_RMS_NORM,
        results=("y", "s"),
    ),
    _rule(
        "dropout_residual",
        functions.dropout_residual,
        *(f"y = {form} + residual" for form in _dropouts("x", "drop")),
        slots=_DROP,
    ),
    _rule(
        "dropout",
        functions.dropout,
        "y = F.dropout(x, drop_p, drop_training, inplace)",
        *(f"y = {form}" for form in _dropouts("x", "drop")[1:]),
        slots={"drop_p": is_number, "drop_training": is_flag, "inplace": is_false},
        inputs=("x",),
    ),
    _rule(
        "gelu_tanh",
        functions.gelu_tanh,
        "y = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))",
        "y = 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))",
        slots={},
        inputs=("x",),
    ),
    *(
        _rule(
            name,
            functools.partial(functions.rms_norm, normalise=normalise),
            pattern,
            slots=_OF_RMS_NORM,
            inputs=("x",),
        )
        for name, normalise, pattern in _RMS_NORMS
    ),
)
"""The rules that are shipped, those that replace most first."""
