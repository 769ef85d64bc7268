"""Tests of a rule's parts, the attributes whose own calls the rule's forward bypasses."""

import numbers
from collections.abc import Hashable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from ..._torch.modules import has_hooks, hooks_of_all_modules, is_plain
from ...module_class import unchanged_class
from ..plain import has_plain_weights, is_parameter, is_plain_linear

_LINEAR_OF_OTHERS: Final = frozenset(
    {("Conv1D", "transformers.pytorch_utils"), ("FalconLinear", "transformers.models.falcon.modeling_falcon")}
)


def is_linear(value: Any) -> bool:
    """`nn.Linear`, or a linear layer of transformers such as `Conv1D`, with plain parameters."""
    cls = unchanged_class(value)
    of_others = (cls.__name__, cls.__module__) in _LINEAR_OF_OTHERS and has_plain_weights(value)
    return of_others or is_plain_linear(value)


def is_dropout(value: Any) -> bool:
    """`nn.Dropout` that is not in place."""
    return unchanged_class(value) is nn.Dropout and is_plain(value) and not value.inplace


def is_layer_norm(value: Any) -> bool:
    """`nn.LayerNorm` over the last dimension, or timm's, with a weight."""
    kind = unchanged_class(value)
    is_of_timm = (kind.__name__, kind.__module__) == ("LayerNorm", "timm.layers.norm")
    return (
        (kind is nn.LayerNorm or (is_of_timm and not value._fast_norm))
        and is_plain(value)
        and len(value.normalized_shape) == 1
        and is_parameter(value.weight)
    )


_ACTIVATIONS: Final = frozenset(
    {
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.Softplus),
        *(nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Identity),
        *(F.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.mish, F.elu, F.selu, F.celu, F.softplus),
        *(F.sigmoid, F.logsigmoid, F.tanh, F.hardswish, F.hardsigmoid, F.hardtanh),
        *(torch.relu, torch.tanh, torch.sigmoid),
    }
)
_OF_OTHERS: Final = frozenset({"transformers.activations", "timm.layers.activations"})


def is_activation(value: Any) -> bool:
    """A deterministic function of torch, or such a module of torch, transformers or timm.

    Backward calls it again, so it must have no parameters and must not be in place.
    """
    if not isinstance(value, nn.Module):
        return isinstance(value, Hashable) and value in _ACTIVATIONS
    kind = unchanged_class(value)
    known = kind in _ACTIVATIONS or kind.__module__ in _OF_OTHERS
    bare = is_plain(value) and not getattr(value, "inplace", False)
    return known and bare and next(value.parameters(), None) is None


def is_number(value: Any) -> bool:
    """A plain number."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    """True or False."""
    return isinstance(value, bool)


def is_identity(value: Any) -> bool:
    """`nn.Identity`."""
    return unchanged_class(value) is nn.Identity and is_plain(value)


def why_not(module: nn.Module, name: str) -> str:
    """Return why a call may not bypass an attribute that failed its test."""
    try:
        value: Any = getattr(module, name)
    except AttributeError:
        return f"there is no {name}"
    if not isinstance(value, nn.Module):
        return f"{name} is a {_name(value)}"
    if "forward" in value.__dict__:
        return f"the forward of {name} is replaced"
    if has_hooks(value):
        return f"{name} has a hook"
    if hooks_of_all_modules():
        return "there is a hook of all modules"
    parts = {f"{name}.{key}": part for key, part in value.named_parameters(recurse=False)}
    strange = next((key for key, part in parts.items() if type(part) is not nn.Parameter), None)
    return f"{name} is a {_name(value)}" if strange is None else f"{strange} is a {_name(parts[strange])}"


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
