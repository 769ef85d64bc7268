"""A module from a function, to compare the parameters' gradients of a layer with those of its formula."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["Call"]


class Call(nn.Module):
    """Calls a function of a module, such as its class's `forward` or a formula of its parameters.

    Args:
        module: the first argument.
        function: the function.
        inputs: arguments by name that need no gradient.
        leaves: names of the tensors after x, which need one.
    """

    def __init__(
        self, module: nn.Module, function: Callable[..., Any], inputs: dict[str, Any], leaves: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.module, self.function, self.inputs, self.leaves = module, function, inputs, leaves

    def forward(self, x: Tensor, *leaves: Tensor) -> Any:
        return self.function(self.module, x, **self.inputs, **dict(zip(self.leaves, leaves, strict=True)))
