"""Views, ops that copy values into new memory, and ops that make tensors from numbers."""

import operator
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx

from .builder import (
    NAMES_OF_DTYPES,
    Builder,
    Kind,
    Rule,
    Value,
    argument_of,
    computed_in,
    is_number,
    is_size,
    source_of,
    tensor_of,
)

_aten: Final = torch.ops.aten


def _rank(node: fx.Node) -> int:
    return tensor_of(node).dim()


def _same(builder: Builder, node: fx.Node) -> Value:
    return builder.value(source_of(node))


def _reshape(builder: Builder, node: fx.Node) -> Value:
    handle, dtype = builder.value(source_of(node))
    old, new = tensor_of(source_of(node)).shape, tensor_of(node).shape
    source, result = ([size for size in shape if not _is_one(size)] for shape in (old, new))
    # `text_of` does not say which symbolic sizes are equal, and all regions of one text share a definition.
    if all(isinstance(size, int) for size in (*source, *result)) and source == result:
        # Only sizes of 1 come and go: that needs no reshape.
        gone = [dim for dim, size in enumerate(old) if _is_one(size)]
        handle = builder.ops.squeeze(handle, gone) if gone else handle
        come = [_is_one(size) for size in new]
        return Value(builder.ops.broadcast(handle, come) if any(come) else handle, dtype)
    sizes: Any = node.args[1]
    return Value(builder.ops.reshape(handle, [builder.size(size) for size in sizes]), dtype)


def _permute(builder: Builder, node: fx.Node) -> Value:
    handle, dtype = builder.value(source_of(node))
    dims: Any = node.args[1]
    return Value(builder.ops.permute(handle, [dim % _rank(node) for dim in dims]), dtype)


def _transpose(builder: Builder, node: fx.Node) -> Value:
    handle, dtype = builder.value(source_of(node))
    dims = list(range(_rank(node)))
    first, second = (int(dim) for dim in node.args[1:3])  # type: ignore[arg-type]
    dims[first], dims[second] = dims[second], dims[first]
    return Value(builder.ops.permute(handle, dims), dtype)


def _unsqueeze(builder: Builder, node: fx.Node) -> Value:
    handle, dtype = builder.value(source_of(node))
    rank = _rank(node)
    index = int(node.args[1]) % rank  # type: ignore[arg-type]
    return Value(builder.ops.broadcast(handle, [dim == index for dim in range(rank)]), dtype)


def _squeeze(builder: Builder, node: fx.Node) -> Value:
    handle, dtype = builder.value(source_of(node))
    dims = _squeezed(node)
    return Value(builder.ops.squeeze(handle, dims), dtype) if dims else Value(handle, dtype)


def _squeezed(node: fx.Node) -> list[int]:
    """The dimensions of size 1 among those named, or among all."""
    shape = tensor_of(source_of(node)).shape
    named: Any = node.args[1] if len(node.args) > 1 else range(len(shape))
    named = [named] if isinstance(named, int) else named
    return sorted(dim % len(shape) for dim in named if isinstance(shape[dim], int) and shape[dim] == 1)


def _expand(builder: Builder, node: fx.Node) -> Value:
    handle, dtype = builder.value(source_of(node))
    rank, shape = _rank(node), tensor_of(source_of(node)).shape
    missing = rank - len(shape)
    if missing:
        handle = builder.ops.broadcast(handle, [True] * missing + [False] * len(shape))
    sizes: Any = node.args[1]
    # -1 for a dimension that stays: for nvFuser, a size would be a new one.
    grown = [
        builder.size(size) if index < missing or _is_one(shape[index - missing]) else -1
        for index, size in enumerate(sizes)
    ]
    return Value(builder.ops.expand(handle, grown), dtype)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _slice(builder: Builder, node: fx.Node) -> Value:
    handle, dtype = builder.value(source_of(node))
    dim, start, end = _sliced(node)
    return Value(_cut(builder, handle, _rank(node), dim, start, end), dtype)


def _sliced(node: fx.Node) -> tuple[int, int, Any]:
    shape = tensor_of(source_of(node)).shape
    dim = int(argument_of(node, 1, "dim", 0)) % len(shape)
    start, end = argument_of(node, 2, "start", None), argument_of(node, 3, "end", None)
    size = shape[dim]
    start = 0 if start is None else start
    end = sys.maxsize if end is None else end
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        start, end, _ = slice(start, end).indices(size)
    return dim, start, end


def _accepts_slice(node: fx.Node) -> bool:
    dim, start, end = _sliced(node)
    known = isinstance(start, int) and isinstance(end, int) and isinstance(tensor_of(source_of(node)).shape[dim], int)
    return known and start < end and argument_of(node, 4, "step", 1) == 1


def _select(builder: Builder, node: fx.Node) -> Value:
    handle, dtype = builder.value(source_of(node))
    dim, index, rank = _selected(node)
    return Value(builder.ops.squeeze(_cut(builder, handle, rank, dim, index, index + 1), [dim]), dtype)


def _selected(node: fx.Node) -> tuple[int, Any, int]:
    shape = tensor_of(source_of(node)).shape
    dim, index = int(node.args[1]) % len(shape), node.args[2]  # type: ignore[arg-type]
    if isinstance(index, int) and index < 0 and isinstance(shape[dim], int):
        index += shape[dim]
    return dim, index, len(shape)


def _accepts_select(node: fx.Node) -> bool:
    dim, index, _ = _selected(node)
    return isinstance(index, int) and isinstance(tensor_of(source_of(node)).shape[dim], int)


def _split(builder: Builder, node: fx.Node) -> tuple[Value, ...]:
    handle, dtype = builder.value(source_of(node))
    rank = _rank(source_of(node))
    dim = int(argument_of(node, 2, "dim", 0)) % rank
    pieces, start = [], 0
    for piece in node.meta["val"]:
        end = start + piece.shape[dim]
        pieces.append(Value(_cut(builder, handle, rank, dim, start, end), dtype))
        start = end
    return tuple(pieces)


def _unbind(builder: Builder, node: fx.Node) -> tuple[Value, ...]:
    handle, dtype = builder.value(source_of(node))
    rank = _rank(source_of(node))
    dim = int(argument_of(node, 1, "dim", 0)) % rank
    cuts = (_cut(builder, handle, rank, dim, index, index + 1) for index in range(len(node.meta["val"])))
    return tuple(Value(builder.ops.squeeze(cut, [dim]), dtype) for cut in cuts)


def _cut(builder: Builder, handle: Any, rank: int, dim: int, start: int, end: Any) -> Any:
    """A range of one dimension, and the whole of the others: by `size_of`, nvFuser knows that they stay the same."""
    starts = [start if index == dim else 0 for index in range(rank)]
    ends = [end if index == dim else builder.size_of(handle, index) for index in range(rank)]
    return builder.ops.slice(handle, starts, ends)


def _accepts_unbind(node: fx.Node) -> bool:
    return isinstance(tensor_of(source_of(node)).shape[int(argument_of(node, 1, "dim", 0))], int)


def _accepts_split(node: fx.Node) -> bool:
    dim = int(argument_of(node, 2, "dim", 0))
    return all(isinstance(piece.shape[dim], int) for piece in (source_of(node).meta["val"], *node.meta["val"]))


def _cat(builder: Builder, node: fx.Node) -> Value:
    dtype = computed_in(node.meta["val"].dtype)
    pieces: Any = node.args[0]
    handles = [builder.cast(builder.value(piece), dtype).handle for piece in pieces]
    return Value(builder.ops.cat(handles, int(argument_of(node, 1, "dim", 0)) % _rank(node)), dtype)


def _accepts_cat(node: fx.Node) -> bool:
    pieces: Any = node.args[0]
    # torch allows an empty vector beside tensors of any rank.
    return all(piece.meta["val"].dim() == _rank(node) for piece in pieces)


def _getitem(builder: Builder, node: fx.Node) -> Value:
    (results, index) = node.args
    value: Value = builder.values[results][index]  # type: ignore[index]
    return value


def _pad(builder: Builder, node: fx.Node) -> Value:
    handle, dtype = builder.value(source_of(node))
    widths: Any = node.args[1]
    fill = builder.number(argument_of(node, 2, "value", 0), dtype)
    return Value(builder.ops.pad(handle, list(widths), fill), dtype)


def _accepts_pad(node: fx.Node) -> bool:
    widths: Any = node.args[1]
    grows = all(isinstance(width, int) and width >= 0 for width in widths)
    return grows and is_number(argument_of(node, 2, "value", 0))


def _slice_backward(builder: Builder, node: fx.Node) -> Value:
    handle, dtype = builder.value(source_of(node))
    rank = _rank(node)
    dim, start, end, size = _filled(node)
    widths = [0] * (2 * (rank - 1 - dim)) + [start, size - end]
    return Value(builder.ops.pad(handle, widths, builder.number(0, dtype)), dtype)


def _filled(node: fx.Node) -> tuple[int, Any, Any, Any]:
    """The dimension, the range in it that has a gradient, and its size."""
    sizes, dim, start, end, _ = node.args[1:]
    dim = int(dim) % _rank(node)  # type: ignore[arg-type]
    size = sizes[dim]  # type: ignore[index]
    if all(isinstance(one, int) for one in (size, start, end)):
        start, end, _ = slice(start, end).indices(size)  # type: ignore[arg-type]
    return dim, start, end, size


def _accepts_slice_backward(node: fx.Node) -> bool:
    _, start, end, size = _filled(node)
    step: Any = node.args[5]
    return step == 1 and all(isinstance(one, int) for one in (start, end, size))


def _filled_with(builder: Builder, node: fx.Node, shape: list[Any], number: Any) -> Value:
    dtype = computed_in(node.meta["val"].dtype)
    return Value(builder.ops.full(shape, builder.number(number, dtype), builder.data_type(dtype)), dtype)


def _full(builder: Builder, node: fx.Node) -> Value:
    sizes: Any = node.args[0]
    return _filled_with(builder, node, [builder.size(size) for size in sizes], node.args[1])


def _full_like(builder: Builder, node: fx.Node) -> Value:
    # Only the sizes of the other tensor are read.
    like = builder.value(source_of(node)).handle
    return _filled_with(builder, node, [builder.size_of(like, dim) for dim in range(_rank(node))], node.args[1])


def _scalar_tensor(builder: Builder, node: fx.Node) -> Value:
    return _filled_with(builder, node, [], node.args[0])


def _accepts_number(index: int) -> Callable[[fx.Node], bool]:
    return lambda node: is_number(node.args[index])


def _arange(builder: Builder, node: fx.Node) -> Value:
    dtype = node.meta["val"].dtype
    start, end = (0, node.args[0]) if len(node.args) == 1 else (node.args[0], node.args[1])
    length = builder.size(end)
    if start:
        length = length - start if isinstance(end, int) else builder.ops.sub(length, start)
    return Value(builder.ops.iota(length, start, 1, builder.data_type(dtype)), dtype)


def _accepts_arange(node: fx.Node) -> bool:
    start, end = (0, node.args[0]) if len(node.args) == 1 else (node.args[0], node.args[1])
    steps: Any = node.args[2:]
    whole = isinstance(start, int) and (isinstance(end, int) or is_size(end)) and steps in ((), (1,))
    return whole and tensor_of(node).dtype == torch.int64


def _iota(builder: Builder, node: fx.Node) -> Value:
    dtype = node.meta["val"].dtype
    start, step = node.kwargs["start"], node.kwargs["step"]
    return Value(builder.ops.iota(builder.size(node.args[0]), start, step, builder.data_type(dtype)), dtype)


def _accepts_iota(node: fx.Node) -> bool:
    whole = isinstance(node.kwargs["start"], int) and isinstance(node.kwargs["step"], int)
    return whole and node.meta["val"].dtype in NAMES_OF_DTYPES


_MOVES: Final = Kind.MOVES
_MAKES: Final = Kind.MAKES
_table: dict[Any, Rule] = {
    _aten.view.default: Rule(_reshape, _MOVES),
    _aten._unsafe_view.default: Rule(_reshape, _MOVES),
    _aten.permute.default: Rule(_permute, _MOVES),
    _aten.transpose.int: Rule(_transpose, _MOVES, lambda node: _rank(node) > 0),
    _aten.unsqueeze.default: Rule(_unsqueeze, _MOVES),
    _aten.squeeze.default: Rule(_squeeze, _MOVES),
    _aten.squeeze.dim: Rule(_squeeze, _MOVES),
    _aten.squeeze.dims: Rule(_squeeze, _MOVES),
    _aten.expand.default: Rule(_expand, _MOVES),
    _aten.slice.Tensor: Rule(_slice, _MOVES, _accepts_slice),
    _aten.split.Tensor: Rule(_split, _MOVES, _accepts_split),
    _aten.split_with_sizes.default: Rule(_split, _MOVES, _accepts_split),
    _aten.unbind.int: Rule(_unbind, _MOVES, _accepts_unbind),
    _aten.select.int: Rule(_select, _MOVES, _accepts_select),
    _aten.alias.default: Rule(_same, _MOVES),
    _aten.detach.default: Rule(_same, _MOVES),
    # torch runs a clone that stands alone, so that nvFuser never returns its input for it.
    _aten.clone.default: Rule(_same, _MOVES),
    _aten.constant_pad_nd.default: Rule(_pad, Kind.CARRIES, _accepts_pad),
    _aten.slice_backward.default: Rule(_slice_backward, Kind.CARRIES, _accepts_slice_backward),
    _aten.cat.default: Rule(_cat, Kind.CARRIES, _accepts_cat),
    operator.getitem: Rule(_getitem, Kind.CARRIES),
    _aten.full.default: Rule(_full, _MAKES, _accepts_number(1)),
    _aten.fill.Scalar: Rule(_full_like, _MAKES, _accepts_number(1)),
    _aten.full_like.default: Rule(_full_like, _MAKES, _accepts_number(1)),
    _aten.scalar_tensor.default: Rule(_scalar_tensor, _MAKES, _accepts_number(0)),
    _aten.arange.default: Rule(_arange, _MAKES, _accepts_arange),
    _aten.arange.start: Rule(_arange, _MAKES, _accepts_arange),
    _aten.arange.start_step: Rule(_arange, _MAKES, _accepts_arange),
    torch.ops.prims.iota.default: Rule(_iota, _MAKES, _accepts_iota),
}

SHAPES: Final[Mapping[Any, Rule]] = MappingProxyType(_table)
