"""Translates a region's graph to a `FusionDefinition`, for one layout of its inputs.

A definition works for all sizes, but only for one layout: which dimensions have size 1 or are expanded, their order in
memory, and which are contiguous.
"""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from ...._torch.tracing import size_hint
from .builder import Builder, Value, computed_in
from .regions import TRANSLATIONS


class TensorLayout(NamedTuple):
    """The properties of an input tensor that a definition depends on, named as in `define_tensor`.

    Attributes:
        shape: 1 where the size is 1, else -1.
        contiguity: for each dimension from the outermost in memory to the innermost: None where the size is 1 or the
            stride 0, else whether the dimensions inside of it are packed without gaps.
        stride_order: for each dimension, the number of dimensions inside of it in memory.
        dtype: the dtype.
        is_cpu: True for a tensor without dimensions on the CPU.
    """

    shape: tuple[int, ...]
    contiguity: tuple[bool | None, ...]
    stride_order: tuple[int, ...]
    dtype: torch.dtype
    is_cpu: bool


InputLayouts = tuple[TensorLayout, ...]
"""The layouts of a region's inputs."""


def layout_of(inputs: Sequence[torch.Tensor]) -> InputLayouts:
    """Return the layouts of these inputs."""
    return tuple(
        _tensor_layout(value.shape, value.stride(), value.dtype, value.is_cpu and value.dim() == 0) for value in inputs
    )


# Every call of a region looks up its layouts; a model has some hundred shapes.
@functools.lru_cache(maxsize=4096)
def _tensor_layout(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, is_cpu: bool) -> TensorLayout:
    rank = len(sizes)
    # By stride, outermost first; an expanded dimension keeps its place.
    outer_first = sorted((dim for dim in range(rank) if strides[dim] != 0), key=lambda dim: -strides[dim])
    for dim in range(rank):
        if strides[dim] == 0:
            outer_first.insert(dim, dim)
    contiguity: list[bool | None] = []
    expected = 1
    for dim in reversed(outer_first):
        if sizes[dim] == 1 or strides[dim] == 0:
            contiguity.append(None)
        else:
            contiguity.append(strides[dim] == expected)
            expected = strides[dim] * sizes[dim]
    stride_order = [0] * rank
    for number, dim in enumerate(outer_first):
        stride_order[dim] = rank - 1 - number
    shape = tuple(1 if size == 1 else -1 for size in sizes)
    return TensorLayout(shape, tuple(reversed(contiguity)), tuple(stride_order), dtype, is_cpu)


def order_of(value: torch.Tensor) -> tuple[int, ...]:
    """Return a dense tensor's dimensions from the outermost in memory to the innermost."""
    strides = [size_hint(stride) for stride in value.stride()]
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def translate(graph: fx.Graph, layout: InputLayouts, definition: Any, module: ModuleType) -> None:
    """Add a region's graph to a `FusionDefinition` inside its `with`; `module` is `nvfuser_direct`."""
    builder = Builder(definition, module)
    taken: dict[int, Any] = {}  # the handles by id: kept here, so that no other handle gets their id
    for node, known in zip(graph.find_nodes(op="placeholder"), layout, strict=True):
        handle = definition.define_tensor(
            shape=list(known.shape),
            contiguity=list(known.contiguity),
            dtype=builder.data_type(known.dtype),
            is_cpu=known.is_cpu,
            stride_order=list(known.stride_order),
        )
        taken[id(handle)] = handle
        # Half precision becomes float32 once for all readers.
        builder.values[node] = builder.cast(Value(handle, known.dtype), computed_in(known.dtype))
    for node in graph.nodes:
        if node.op == "call_function":
            builder.values[node] = TRANSLATIONS[node.target].emit(builder, node)
    results: Any = graph.output_node().args[0]
    for node in results:
        handle = builder.cast(builder.values[node], node.meta["val"].dtype).handle
        if id(handle) in taken:
            handle = builder.ops.set(handle)  # an output must not be an input or another output
        taken[id(handle)] = handle
        definition.add_output(handle)
