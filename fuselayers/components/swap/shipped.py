"""The rules that are shipped."""

from typing import Final

from . import functions
from .rules import Rule
from .slots import is_activation, is_dropout, is_false, is_layer_norm, is_linear, is_number, is_parameter

__all__ = ["RULES"]

RULES: Final = (
    Rule(
        "gated_mlp",
        patterns=("y = down(activation(gate(x)) * up(x))",),
        inputs=("x",),
        results=("y",),
        replacement=functions.gated_mlp,
        slots={"gate": is_linear, "up": is_linear, "activation": is_activation, "down": is_linear},
    ),
    Rule(
        "packed_gated_mlp",
        patterns=(
            """
            gate, up = gate_up(x).chunk(2, dim=-1)
            y = down(up * activation(gate))
            """,
        ),
        inputs=("x",),
        results=("y",),
        replacement=functions.packed_gated_mlp,
        slots={"gate_up": is_linear, "activation": is_activation, "down": is_linear},
    ),
    Rule(
        "mlp",
        patterns=(
            "y = outer(down(inner(activation(up(x)))))",
            "y = outer(down(activation(up(x))))",
            "y = down(inner(activation(up(x))))",
            "y = down(activation(up(x)))",
        ),
        inputs=("x",),
        results=("y",),
        replacement=functions.mlp,
        slots={
            "up": is_linear,
            "activation": is_activation,
            "down": is_linear,
            "inner": is_dropout,
            "outer": is_dropout,
        },
    ),
    Rule(
        "linear_dropout_residual_norm",
        patterns=("y = norm(drop(dense(x)) + residual)",),
        inputs=("x", "residual"),
        results=("y",),
        replacement=functions.linear_dropout_residual_norm,
        slots={"dense": is_linear, "drop": is_dropout, "norm": is_layer_norm},
    ),
    Rule(
        "dropout_residual",
        patterns=("y = drop(x) + residual",),
        inputs=("x", "residual"),
        results=("y",),
        replacement=functions.module_dropout_residual,
        slots={"drop": is_dropout},
    ),
    Rule(
        "dropout_residual",
        patterns=("y = F.dropout(x, p=p, training=self.training) + residual",),
        inputs=("x", "residual"),
        results=("y",),
        replacement=functions.dropout_residual,
        slots={"p": is_number},
    ),
    Rule(
        "dropout",
        patterns=("y = F.dropout(x, p, self.training, inplace)", "y = F.dropout(x, p=p, training=self.training)"),
        inputs=("x",),
        results=("y",),
        replacement=functions.dropout,
        slots={"p": is_number, "inplace": is_false},
    ),
    Rule(
        "rms_norm",
        patterns=(
            """
            f = x.to(torch.float32)
            y = weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
            """,
        ),
        inputs=("x",),
        results=("y",),
        replacement=functions.rms_norm,
        slots={"weight": is_parameter, "eps": is_number},
    ),
    Rule(
        "rms_norm",
        patterns=(
            """
            f = x.to(torch.float32)
            y = (weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)
            """,
        ),
        inputs=("x",),
        results=("y",),
        replacement=functions.rms_norm_as_x,
        slots={"weight": is_parameter, "eps": is_number},
    ),
    Rule(
        "rms_norm_from_one",
        patterns=(
            """
            f = x.float()
            y = (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).type_as(x)
            """,
        ),
        inputs=("x",),
        results=("y",),
        replacement=functions.rms_norm_from_one,
        slots={"weight": is_parameter, "eps": is_number},
    ),
)
"""The rules that are shipped, those that replace most first."""
