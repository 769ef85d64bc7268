"""What a translation of one op writes to: a `FusionDefinition` under construction, and the values it has so far.

bfloat16 and float16 are read, computed with in float32, and rounded where a value leaves the definition. Nothing is
rounded in between: that is what fusing gains in accuracy, and what Inductor does as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
import torch.fx as fx

__all__ = [
    "NAMES_OF_DTYPES",
    "Builder",
    "Kind",
    "Rule",
    "Value",
    "argument_of",
    "computed_in",
    "is_number",
    "is_size",
    "source_of",
    "tensor_of",
]

NAMES_OF_DTYPES: Final = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Int",
    torch.int32: "Int32",
    torch.bool: "Bool",
}
"""The dtypes that a translated graph may hold, by their names in nvFuser's `DataType`."""


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of `dtype` have inside a definition."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor that a node stands for."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def source_of(node: fx.Node) -> fx.Node:
    """A node's first argument, where it is a tensor."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def argument_of(node: fx.Node, place: int, name: str, default: Any) -> Any:
    """An argument that may be given by its place or by its name, or not at all."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def is_number(argument: Any) -> bool:
    """True for a number that is known while the graph is translated."""
    return isinstance(argument, bool | int | float)


def is_size(argument: Any) -> bool:
    """True for a node that is a size, which only a call knows."""
    return isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), int | torch.SymInt)


class Value(NamedTuple):
    """A tensor of a definition: nvFuser's object, and the dtype that it has there."""

    handle: Any
    dtype: torch.dtype


class Kind(Enum):
    """What an op is to a region of ops: see `regions`."""

    COMPUTES = "computes"
    CARRIES = "puts values side by side in new memory, or takes one of a tuple"
    MOVES = "looks at the same values in another way, or copies them"
    MAKES = "makes a tensor from numbers alone"


@dataclass(frozen=True)
class Rule:
    """How an op is translated.

    Attributes:
        emit: adds the op to the builder's definition and returns its result, or the tuple of its results.
        kind: what a region makes of it.
        accepts: whether a node's arguments are among those that `emit` knows.
    """

    emit: "Callable[[Builder, fx.Node], Value | tuple[Value, ...]]"
    kind: Kind = Kind.COMPUTES
    accepts: Callable[[fx.Node], bool] = field(default=lambda node: True)


class Builder:
    """A definition and the values of the graph's nodes in it.

    Args:
        definition: the `FusionDefinition` inside its `with`.
        module: `nvfuser_direct`.
    """

    def __init__(self, definition: Any, module: ModuleType) -> None:
        self.definition = definition
        self.ops = definition.ops
        self.values: dict[fx.Node, Any] = {}
        self._data_types = module.DataType
        # What is written once. The handles are kept, so that their ids stay their names.
        self._casts: dict[tuple[int, torch.dtype], Value] = {}
        self._widened: dict[tuple[int, int], Any] = {}
        self._sizes: dict[tuple[int, int], Any] = {}
        self._kept: list[Any] = []

    def data_type(self, dtype: torch.dtype) -> Any:
        """nvFuser's name for a dtype."""
        return getattr(self._data_types, NAMES_OF_DTYPES[dtype])

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """The value in another dtype."""
        if value.dtype == dtype:
            return value
        key = (id(value.handle), dtype)
        if key not in self._casts:
            self._kept.append(value.handle)
            self._casts[key] = Value(self.ops.cast(value.handle, self.data_type(dtype)), dtype)
        return self._casts[key]

    def value(self, node: fx.Node) -> Value:
        """What a node has become."""
        found = self.values[node]
        assert isinstance(found, Value)
        return found

    def operand(self, argument: Any, dtype: torch.dtype, rank: int) -> Any:
        """An argument of an elementwise op, in a dtype and with leading dimensions added up to a rank.

        A number becomes one of the dtype's kind, since nvFuser's promotion is not torch's: an integer tensor times a
        float is a double there. A symbolic size stays what it is.
        """
        if not isinstance(argument, fx.Node):
            return self.number(argument, dtype)
        found = self.values[argument]
        if not isinstance(found, Value):
            return found
        handle = self.cast(found, dtype).handle
        missing = rank - argument.meta["val"].dim()
        if not missing:
            return handle
        key = (id(handle), missing)
        if key not in self._widened:
            self._kept.append(handle)
            self._widened[key] = self.ops.broadcast(handle, [True] * missing + [False] * (rank - missing))
        return self._widened[key]

    def size_of(self, handle: Any, dim: int) -> Any:
        """The size of a tensor of the definition in one dimension, whatever it will be."""
        key = (id(handle), dim)
        if key not in self._sizes:
            self._kept.append(handle)
            self._sizes[key] = self.ops.size(handle, dim)
        return self._sizes[key]

    def number(self, argument: Any, dtype: torch.dtype) -> Any:
        """A number of the kind that a dtype is of."""
        if dtype == torch.bool:
            # The binding would take Python's True for an integer.
            return self.definition.define_scalar(bool(argument), self.data_type(dtype))
        return float(argument) if dtype.is_floating_point else int(argument)

    def size(self, argument: Any) -> Any:
        """A size: an int, or what a symbolic one has become."""
        return self.values[argument] if isinstance(argument, fx.Node) else argument
