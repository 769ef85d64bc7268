"""The `FusionDefinition` under construction, and the translations of single ops into it.

bfloat16 and float16 are cast to float32 on reading, and rounded where a value leaves the definition. Values in between
are not rounded, so fused code is more accurate, as in Inductor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.fx as fx

NAMES_OF_DTYPES: Final = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Int",
    torch.int32: "Int32",
    torch.bool: "Bool",
}
"""The supported dtypes, and their names in nvFuser's `DataType`."""


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of `dtype` have inside a definition."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def source_of(node: fx.Node) -> fx.Node:
    """A node's first argument, if it is a tensor."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def is_number(argument: Any) -> bool:
    """True for a Python number."""
    return isinstance(argument, bool | int | float)


class Value(NamedTuple):
    """A tensor of a definition: nvFuser's handle, and its dtype there."""

    handle: Any
    dtype: torch.dtype


@dataclass(frozen=True)
class Translation:
    """How an op is translated.

    Attributes:
        emit: adds the op to the builder's definition and returns its result, or the tuple of its results.
        kind: how a region treats the op. "computes": it is arithmetic. "carries": it joins tensors, or takes one of a
            tuple. "moves": it is a view or a copy. "makes": it makes a tensor from numbers alone.
        accepts: whether `emit` supports the node's arguments.
    """

    emit: "Callable[[Builder, fx.Node], Value | tuple[Value, ...]]"
    kind: Literal["computes", "carries", "moves", "makes"] = "computes"
    accepts: Callable[[fx.Node], bool] = lambda node: True


class Builder:
    """A `FusionDefinition` inside its `with`, and its value for each node of the graph."""

    def __init__(self, definition: Any, module: ModuleType) -> None:
        self.definition = definition
        self.ops = definition.ops
        self.values: dict[fx.Node, Any] = {}  # a `Value`, or a tuple of them
        self._data_types = module.DataType

    def data_type(self, dtype: torch.dtype) -> Any:
        """nvFuser's name for a dtype."""
        return getattr(self._data_types, NAMES_OF_DTYPES[dtype])

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """The value in another dtype."""
        if value.dtype == dtype:
            return value
        return Value(self.ops.cast(value.handle, self.data_type(dtype)), dtype)

    def operand(self, argument: Any, dtype: torch.dtype, rank: int) -> Any:
        """An argument of an elementwise op, in a dtype and with leading dimensions added up to a rank.

        A number is converted to the dtype's kind, since nvFuser promotes differently from torch: an integer tensor
        times a float is a double there.
        """
        if not isinstance(argument, fx.Node):
            return self.number(argument, dtype)
        handle = self.cast(self.values[argument], dtype).handle
        missing = rank - argument.meta["val"].dim()
        return self.ops.broadcast(handle, [True] * missing + [False] * (rank - missing)) if missing else handle

    def number(self, argument: Any, dtype: torch.dtype) -> Any:
        """A Python number converted to the dtype's kind: a bool, an integer or a float."""
        if dtype == torch.bool:
            # nvFuser would take Python's True for an integer.
            return self.definition.define_scalar(bool(argument), self.data_type(dtype))
        return float(argument) if dtype.is_floating_point else int(argument)
