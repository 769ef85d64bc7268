"""Attention by the kernels of `ops.attention` on a CPU, which save no weights."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....ops.attention.torch_calls import attention_of_torch_call
from ..layer import own_forward
from ..rule import Rule


class _OwnAttention(TorchFunctionMode):
    """Runs `attention_of_torch_call` for each `F.scaled_dot_product_attention`."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _OWN.get(func, func)(*args, **(kwargs or {}))


# Dynamo cannot inline the method `unflatten`, as it must under a mode.
_OWN: Final = {F.scaled_dot_product_attention: attention_of_torch_call, Tensor.unflatten: torch.unflatten}


def attention(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, with this library's attention in place of `F.scaled_dot_product_attention`."""
    tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    # Elsewhere the mode would change nothing. In strict export Dynamo inlines `unflatten` all the same.
    if tensor is None or not tensor.is_cpu or torch.compiler.is_exporting():
        return own_forward(self, *args, **kwargs)
    # Without gradients too: reentrant checkpointing runs forward that way, and backward must drop the same weights.
    with _OwnAttention():
        return own_forward(self, *args, **kwargs)


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module's class is named an attention, and it contains no other attention."""
    inside = [child for child in module.modules() if "Attention" in type(child).__name__]
    return inside == [module] and not type(module).__module__.startswith("torch.")


RULES: Final[tuple[Rule, ...]] = (Rule("attention", of=nn.Module, forward=attention, fits=_is_attention),)
