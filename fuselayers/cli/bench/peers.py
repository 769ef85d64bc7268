"""Other libraries' layers that the suite times beside ours, where they are installed."""

import importlib.util
from collections.abc import Callable
from typing import Any, Final

__all__ = ["LIGER", "liger_form"]

LIGER: Final = "Liger"


def liger_form(name: str, options: dict[str, Any]) -> Callable[..., Any] | None:
    """Return what Liger-Kernel has for an op, called as the op is; None where it has nothing, or is not installed.

    Written for version 0.8.5.

    Args:
        name: the op's.
        options: with which it is called; Liger has one form of some ops.

    Raises:
        AttributeError, ImportError: the version that is installed lacks the function, or cannot be imported.

    >>> liger_form("no_such_op", {}) is None
    True
    """
    make = _FORMS.get(name)
    if make is None or importlib.util.find_spec("liger_kernel") is None:
        return None
    return make(importlib.import_module("liger_kernel.transformers.functional"), options)


def _layer_norm(functional: Any, options: dict[str, Any]) -> Callable[..., Any] | None:
    form = functional.liger_layer_norm
    return lambda x, weight, bias: form(x, weight, bias, 1e-5)


def _rms_norm(functional: Any, options: dict[str, Any]) -> Callable[..., Any] | None:
    # As it is by default, its backward would write its gradient over the incoming one.
    form = functional.liger_rms_norm
    return lambda x, weight: form(x, weight, 1e-6, in_place=False)


def _residual_rms_norm(functional: Any, options: dict[str, Any]) -> Callable[..., Any] | None:
    form = functional.liger_fused_add_rms_norm
    return lambda x, residual, weight: form(x, residual, weight, 1e-6, in_place=False)


def _gated_activation(functional: Any, options: dict[str, Any]) -> Callable[..., Any] | None:
    activation = options.get("activation")
    if activation == "silu":
        form = functional.liger_swiglu
    elif activation == "gelu_tanh":
        form = functional.liger_geglu
    else:
        return None
    return lambda gate, up, activation: form(gate, up)


def _softmax(functional: Any, options: dict[str, Any]) -> Callable[..., Any] | None:
    form = functional.liger_softmax
    return lambda scores: form(scores)


def _rotary(functional: Any, options: dict[str, Any]) -> Callable[..., Any] | None:
    form = functional.liger_rope

    return lambda q, k, cos, sin: form(q, k, cos, sin, rotary_dim=2 * cos.shape[-1])


def _cross_entropy(functional: Any, options: dict[str, Any]) -> Callable[..., Any] | None:
    form = functional.liger_cross_entropy
    return lambda logits, target: form(logits.flatten(0, -2), target.flatten())


def _linear_cross_entropy(functional: Any, options: dict[str, Any]) -> Callable[..., Any] | None:
    form = functional.liger_fused_linear_cross_entropy
    return lambda x, weight, target: form(x.flatten(0, -2), weight, target.flatten())


_FORMS: Final[dict[str, Callable[[Any, dict[str, Any]], Callable[..., Any] | None]]] = {
    "cross_entropy": _cross_entropy,
    "gated_activation": _gated_activation,
    "layer_norm": _layer_norm,
    "linear_cross_entropy": _linear_cross_entropy,
    "residual_rms_norm": _residual_rms_norm,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "softmax": _softmax,
}
