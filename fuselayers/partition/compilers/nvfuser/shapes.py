"""Views, and ops that copy values into new memory or make tensors from numbers. torch runs slices and pads."""

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.fx as fx

from ...node_kinds import arguments_of
from .builder import Builder, Translation, Value, computed_in, is_number, source_of, tensor_of

_aten: Final = torch.ops.aten


def _rank(node: fx.Node) -> int:
    return tensor_of(node).dim()


def _view(change: Callable[[Any, Any, fx.Node], Any]) -> Translation:
    """The translation of a view: `change` takes nvFuser's operations, the source's handle and the node to a handle."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        handle, dtype = builder.values[source_of(node)]
        return Value(change(builder.ops, handle, node), dtype)

    return Translation(emit, "moves")


def _reshape(ops: Any, handle: Any, node: fx.Node) -> Any:
    old, new = tensor_of(source_of(node)).shape, tensor_of(node).shape
    source, result = ([size for size in shape if not _is_one(size)] for shape in (old, new))
    if all(isinstance(size, int) for size in (*source, *result)) and source == result:
        # Only dimensions of size 1 are added or removed, which needs no reshape.
        gone = [dim for dim, size in enumerate(old) if _is_one(size)]
        handle = ops.squeeze(handle, gone) if gone else handle
        come = [_is_one(size) for size in new]
        return ops.broadcast(handle, come) if any(come) else handle
    sizes: Any = node.args[1]
    return ops.reshape(handle, list(sizes))


def _permute(ops: Any, handle: Any, node: fx.Node) -> Any:
    dims: Any = node.args[1]
    return ops.permute(handle, [dim % _rank(node) for dim in dims])


def _unsqueeze(ops: Any, handle: Any, node: fx.Node) -> Any:
    rank = _rank(node)
    index = int(node.args[1]) % rank  # type: ignore[arg-type]
    return ops.broadcast(handle, [dim == index for dim in range(rank)])


def _squeeze(ops: Any, handle: Any, node: fx.Node) -> Any:
    shape = tensor_of(source_of(node)).shape
    named: Any = node.args[1]
    named = [named] if isinstance(named, int) else named
    dims = sorted(dim % len(shape) for dim in named if _is_one(shape[dim]))
    return ops.squeeze(handle, dims) if dims else handle


def _expand(ops: Any, handle: Any, node: fx.Node) -> Any:
    rank, shape = _rank(node), tensor_of(source_of(node)).shape
    missing = rank - len(shape)
    if missing:
        handle = ops.broadcast(handle, [True] * missing + [False] * len(shape))
    sizes: Any = node.args[1]
    # -1 for a dimension that stays: nvFuser would take a size as a new one.
    grown = [size if index < missing or _is_one(shape[index - missing]) else -1 for index, size in enumerate(sizes)]
    return ops.expand(handle, grown)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _cat(builder: Builder, node: fx.Node) -> Value:
    dtype = computed_in(node.meta["val"].dtype)
    pieces: Any = node.args[0]
    handles = [builder.cast(builder.values[piece], dtype).handle for piece in pieces]
    return Value(builder.ops.cat(handles, int(arguments_of(node).get("dim", 0)) % _rank(node)), dtype)


def _getitem(builder: Builder, node: fx.Node) -> Value:
    (results, index) = node.args
    value: Value = builder.values[results][index]  # type: ignore[index]
    return value


def _full(builder: Builder, node: fx.Node) -> Value:
    dtype = computed_in(tensor_of(node).dtype)
    number = builder.number(node.args[-1], dtype)
    return Value(builder.ops.full(list(tensor_of(node).shape), number, builder.data_type(dtype)), dtype)


def _accepts_full(node: fx.Node) -> bool:
    return is_number(node.args[-1]) and all(isinstance(size, int) for size in tensor_of(node).shape)


_SAME: Final = _view(lambda ops, handle, node: handle)
SHAPES: Final[Mapping[Any, Translation]] = {
    _aten.view.default: _view(_reshape),
    _aten._unsafe_view.default: _view(_reshape),
    _aten.permute.default: _view(_permute),
    _aten.unsqueeze.default: _view(_unsqueeze),
    _aten.squeeze.dim: _view(_squeeze),
    _aten.squeeze.dims: _view(_squeeze),
    _aten.expand.default: _view(_expand),
    _aten.alias.default: _SAME,
    _aten.detach.default: _SAME,
    # torch runs a clone that stands alone, so that nvFuser never returns its input for it.
    _aten.clone.default: _SAME,
    # torch allows an empty vector beside tensors of any rank.
    _aten.cat.default: Translation(
        _cat, "carries", lambda node: all(_rank(piece) == _rank(node) for piece in node.all_input_nodes)
    ),
    operator.getitem: Translation(_getitem, "carries"),
    _aten.full.default: Translation(_full, "makes", _accepts_full),
    _aten.full_like.default: Translation(_full, "makes", _accepts_full),
    _aten.scalar_tensor.default: Translation(_full, "makes", _accepts_full),
}
