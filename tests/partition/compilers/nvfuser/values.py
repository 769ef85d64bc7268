"""What a definition holds before it runs: tensors with their axes, scalars, and the steps that make one from another.

An axis is one of three kinds, as in nvFuser. An *iteration* axis has a size, known or not, and never stretches: not
even when it turns out to be 1. A *broadcast* axis has size 1, and may be expanded to a size. A *symbolic* axis is one
whose kind is only known with the sizes of the inputs: what a reshape or a slice by unknown sizes leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tests.partition.compilers.nvfuser.data_types import DataType, to_torch

__all__ = ["MAX_RANK", "Axis", "Fusion", "Scalar", "Step", "TensorView", "Val", "axis_of_size", "checked"]

MAX_RANK = 8


def checked(condition: object, *message: object) -> None:
    """nvFuser's check: a RuntimeError of the message's parts, put together."""
    if not condition:
        raise RuntimeError("".join(map(str, message)))


@dataclass(frozen=True)
class Axis:
    """One axis: its kind, its size where that is known at definition, and whether a broadcast one was expanded."""

    kind: Literal["iteration", "broadcast", "symbolic"]
    size: int | None
    is_expanded: bool = False

    @property
    def is_broadcast(self) -> bool:
        return self.kind == "broadcast"

    @property
    def may_stretch(self) -> bool:
        """Whether it is a broadcast of size 1 that another operand may stretch."""
        return self.is_broadcast and not self.is_expanded


def axis_of_size(size: int | None) -> Axis:
    """The axis of an operation that makes a new size: broadcast if it is 1, symbolic as long as it is unknown."""
    if size is None:
        return Axis("symbolic", None)
    return Axis("broadcast", 1) if size == 1 else Axis("iteration", size)


class Val:
    """A value of one fusion."""

    def __init__(self, fusion: Fusion, data_type: DataType) -> None:
        self.fusion = fusion
        self.data_type = data_type

    def __repr__(self) -> str:
        return self.fusion.names.get(id(self), "an unnamed value")

    def is_tensor(self) -> bool:
        return isinstance(self, TensorView)


class Scalar(Val):
    """A number: known at definition, or an input, or computed from such."""

    def __init__(self, fusion: Fusion, data_type: DataType, value: Any = None) -> None:
        super().__init__(fusion, data_type)
        self.value = value

    def is_symbolic(self) -> bool:
        return self.value is None


class TensorView(Val):
    """A tensor: its axes and its type, and whether it is made of nothing but scalar tensors on the CPU.

    `allocation` is how an input lies in memory, outermost axis first; `contiguity` is in that order.
    """

    def __init__(self, fusion: Fusion, data_type: DataType, axes: Sequence[Axis], *, is_cpu: bool = False) -> None:
        super().__init__(fusion, data_type)
        checked(
            len(axes) <= MAX_RANK, "a tensor has at most ", MAX_RANK, " dimensions, this one would have ", len(axes)
        )
        self.axes = tuple(axes)
        self.is_cpu = is_cpu
        self.allocation: tuple[int, ...] = tuple(range(len(self.axes)))
        self.contiguity: tuple[bool | None, ...] = ()

    @property
    def ndim(self) -> int:
        return len(self.axes)

    def dtype(self) -> DataType:
        return self.data_type

    def is_symbolic(self) -> bool:
        return True

    def size(self, dim: int) -> Scalar:
        made: Scalar = self.fusion.called("size", (self, dim), {})
        return made

    def shape(self) -> list[Scalar]:
        made: list[Scalar] = self.fusion.called("shape", (self,), {})
        return made


@dataclass(frozen=True)
class Step:
    """One computation: `compute` takes what the inputs are at run time, and answers what the outputs are."""

    inputs: tuple[Val, ...]
    outputs: tuple[Val, ...]
    compute: Callable[..., Any]


@dataclass(eq=False)
class Fusion:
    """A definition, while it is written and after: its inputs, outputs, steps, and the lines that wrote it."""

    called: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
    inputs: list[Val] = field(default_factory=list)
    outputs: list[tuple[TensorView, TensorView | None]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    tensors: list[Val] = field(default_factory=list)
    scalars: list[Val] = field(default_factory=list)

    def tensor(
        self, data_type: DataType, axes: Sequence[Axis], inputs: Sequence[Val], compute: Callable[..., Tensor]
    ) -> TensorView:
        """A new tensor that `compute` makes of the inputs' values."""
        tensors = [one for one in inputs if isinstance(one, TensorView)]
        on_cpu = bool(tensors) and all(one.is_cpu for one in tensors)
        made = TensorView(self, data_type, axes, is_cpu=on_cpu)
        self.steps.append(Step(tuple(inputs), (made,), lambda *values: (compute(*values),)))
        return made

    def scalar(self, data_type: DataType, inputs: Sequence[Val], compute: Callable[..., Any]) -> Scalar:
        """A new scalar that `compute` makes of the inputs' values: at once, where all of them are known."""
        known = [one.value if isinstance(one, Scalar) else None for one in inputs]
        if known and all(value is not None for value in known):
            return Scalar(self, data_type, compute(*known))
        made = Scalar(self, data_type)
        self.steps.append(Step(tuple(inputs), (made,), lambda *values: (compute(*values),)))
        return made

    def constant(self, value: Any, data_type: DataType | None = None) -> Scalar:
        """A number of the definition. Python's True is an integer to the binding unless its type is given."""
        if data_type is None:
            if isinstance(value, int):
                data_type = DataType.Int
            else:
                data_type = DataType.Double if isinstance(value, float) else DataType.ComplexDouble
        return Scalar(self, data_type, torch.tensor(value, dtype=to_torch(data_type)).item())

    def print_math(self) -> str:
        """The definition as text."""
        return "\n".join(self.lines)

    def run(self, values: dict[int, Any]) -> None:
        """Computes what the outputs need, and nothing else, from the inputs' values, by `id`, into the same dict."""
        needed = {id(output) for output, _ in self.outputs}
        for step in reversed(self.steps):
            if any(id(output) in needed for output in step.outputs):
                needed.update(map(id, step.inputs))
        for step in self.steps:
            if any(id(output) in needed for output in step.outputs):
                given = [
                    one.value if isinstance(one, Scalar) and one.value is not None else values[id(one)]
                    for one in step.inputs
                ]
                values.update(zip(map(id, step.outputs), step.compute(*given), strict=True))
