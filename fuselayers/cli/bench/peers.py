"""Other libraries' functions that the suite times beside ours, where they are installed."""

import importlib.util
from collections.abc import Callable
from typing import Any, Final

LIGER: Final = "Liger"
# Given Liger's functions, a function with the arguments of our op. In place, as by default, the norms' backwards would
# overwrite the incoming gradient.
_FUNCTIONS: Final[dict[str, Callable[[Any], Callable[..., Any]]]] = {
    "cross_entropy": lambda liger: (
        lambda logits, target: liger.liger_cross_entropy(logits.flatten(0, -2), target.flatten())
    ),
    "gated_activation silu": lambda liger: lambda gate, up, activation: liger.liger_swiglu(gate, up),
    "gated_activation gelu_tanh": lambda liger: lambda gate, up, activation: liger.liger_geglu(gate, up),
    "layer_norm": lambda liger: lambda x, weight, bias: liger.liger_layer_norm(x, weight, bias, 1e-5),
    "linear_cross_entropy": lambda liger: (
        lambda x, weight, target: liger.liger_fused_linear_cross_entropy(x.flatten(0, -2), weight, target.flatten())
    ),
    "residual_rms_norm": lambda liger: (
        lambda x, residual, weight: liger.liger_fused_add_rms_norm(x, residual, weight, 1e-6, in_place=False)
    ),
    "rms_norm": lambda liger: lambda x, weight: liger.liger_rms_norm(x, weight, 1e-6, in_place=False),
    "rotary": lambda liger: lambda q, k, cos, sin: liger.liger_rope(q, k, cos, sin, rotary_dim=2 * cos.shape[-1]),
}


def liger_function(name: str, options: dict[str, Any]) -> Callable[..., Any] | None:
    """Return Liger-Kernel's function for an op, with the op's arguments; None where it has none or is not installed.

    Written for version 0.8.5, whose functions are looked up when they are called.

    Args:
        name: of the op.
        options: of the call.

    Raises:
        ImportError: the installed version cannot be imported.

    >>> liger_function("no_such_op", {}) is None
    True
    """
    make = _FUNCTIONS.get(f"{name} {options['activation']}" if name == "gated_activation" else name)
    if make is None or importlib.util.find_spec("liger_kernel") is None:
        return None
    return make(importlib.import_module("liger_kernel.transformers.functional"))
