"""Tests of a rule's parts, the attributes whose own calls the rule's forward bypasses."""

import numbers
from collections.abc import Hashable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._torch.dispatch import FakeTensor, hooks_of_all_modules
from ..hooks import has_hooks
from ..linear import Linear


def original_type(value: Any) -> type:
    """Return the type that a value had before it was swapped."""
    kind = type(value)
    original: type | None = getattr(kind, "swapped_from", None)
    # A subclass of a swapped class, such as FSDP's, is another type.
    return original if original is not None and kind.__bases__ == (original,) else kind


def is_plain(module: Any) -> bool:
    """Return whether calling a module runs the forward of its class and nothing else."""
    if not isinstance(module, nn.Module) or has_hooks(module):
        return False
    if any(name in module.__dict__ for name in ("forward", "_call_impl", "_wrapped_call_impl")):
        return False
    return module.__dict__.get("_compiled_call_impl") is None and not hooks_of_all_modules()


_LINEAR_OF_OTHERS: Final = frozenset(
    {("Conv1D", "transformers.pytorch_utils"), ("FalconLinear", "transformers.models.falcon.modeling_falcon")}
)


def is_linear(value: Any) -> bool:
    """`nn.Linear`, or a linear layer of transformers such as `Conv1D`, with plain parameters."""
    kind = original_type(value)
    if kind not in (nn.Linear, Linear) and (kind.__name__, kind.__module__) not in _LINEAR_OF_OTHERS:
        return False
    return is_plain(value) and is_parameter(value.weight) and (value.bias is None or is_parameter(value.bias))


def is_parameter(value: Any) -> bool:
    """A whole floating-point parameter, neither sharded nor quantised.

    During a call it may be a plain tensor, which FSDP1 and `torch.func.functional_call` put there. In a model without
    memory it may be a fake tensor.
    """
    return type(value) in (nn.Parameter, Tensor, FakeTensor) and value.is_floating_point()


def is_dropout(value: Any) -> bool:
    """`nn.Dropout` that is not in place."""
    return original_type(value) is nn.Dropout and is_plain(value) and not value.inplace


def is_layer_norm(value: Any) -> bool:
    """`nn.LayerNorm` over the last dimension, or timm's, with a weight."""
    kind = original_type(value)
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
    kind = original_type(value)
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
    return original_type(value) is nn.Identity and is_plain(value)


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
