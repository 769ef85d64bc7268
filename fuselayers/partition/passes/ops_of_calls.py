"""ops_of_calls -- in a Dynamo graph on a GPU, let this library's ops take the place of calls that they stand for.

    norm          F.layer_norm, F.rms_norm, and the RMS norm of transformers            -> normalise
    activation    dropout(activation(linear(x, weight, bias))), each part but one absent  -> bias_activation_dropout
    gate          activation(gate) * up                                                  -> gated_activation
    residual      dropout(linear(x, weight, bias)) + residual                            -> bias_activation_dropout

The bias of a linear layer moves into the op, whose backward sums its gradient. The masks are those of
`seeded_dropout_calls_pass`, which runs before, and the result differs by rounding: an op computes in float32 and rounds
once. A sum and the norm after it become one kernel after the cut (`joined_kernels`). A rotation of queries and keys,
and a cross entropy, are left to Inductor, whose code moves as many bytes as the ops' kernels.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from ..._torch.dispatch import OpOverload, may_write
from ..._torch.tracing import all_nodes, recompiled
from ...ops.implementations import dispatch
from ...ops.rows import LONGEST_ROW

_Found = dict[str, Any]
_PARTS: Final = "the nodes"
_OWNERS: Final = (torch, F, operator)
_OWN: Final = __name__.partition(".")[0]
_DROPOUT: Final = dispatch.node_of("dropout")
_ELEMENTWISE: Final = dispatch.node_of("bias_activation_dropout")
_GATED: Final = dispatch.node_of("gated_activation")
_NORM: Final = dispatch.node_of("normalise")

# A call is a tuple: the name of a function or method, and its arguments. A string is an argument's name: equal strings
# stand for one value.
_GELU_OF_GPT2: Final = (
    "mul",
    ("mul", 0.5, "x"),
    ("add", 1.0, ("tanh", ("mul", 0.7978845608028654, ("add", "x", ("mul", 0.044715, ("pow", "x", 3.0)))))),
)
_ACTIVATIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("gelu", ("gelu", "x")),
    ("gelu", ("gelu", "x", "none")),
    ("gelu_tanh", ("gelu", "x", "tanh")),
    ("gelu_tanh", _GELU_OF_GPT2),
    ("relu", ("relu", "x")),
    ("relu", ("relu", "x", False)),
    ("silu", ("silu", "x")),
    ("silu", ("silu", "x", False)),
)
_WIDE: Final = ("to", "x", torch.float32)
_MEAN_SQUARE: Final = ("mean", ("pow", _WIDE, 2), -1, True)
_RMS_NORM_OF_TRANSFORMERS: Final = (
    "mul",
    "weight",
    ("to", ("mul", _WIDE, ("rsqrt", ("add", _MEAN_SQUARE, "eps"))), "dtype"),
)


def ops_of_calls_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Replace the calls by ops, in the graph and in its nested graphs."""
    graphs = {node.graph for node in all_nodes(graph_module)}
    for graph in graphs:
        for node in list(graph.nodes):
            if not node._erased and node.op in ("call_function", "call_method") and _fits(node):
                for pattern in PATTERNS.get(_name_of(node), ()):
                    if pattern(node):
                        break
    return recompiled(graph_module)


def _fits(node: fx.Node) -> bool:
    """True for a result that the kernels can compute."""
    value = _value_of(node)
    if (
        not isinstance(value, Tensor)
        or not value.dim()
        or not dispatch.is_on_gpu(value)
        or value.dtype not in dispatch.KERNEL_DTYPES
    ):
        return False
    return isinstance(value.shape[-1], int) and value.shape[-1] <= LONGEST_ROW


def _layer_norm(node: fx.Node) -> bool:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    return _norm(node, {"bias": None, "eps": 1e-5} | _bound(node, names), rms=False)


def _rms_norm(node: fx.Node) -> bool:
    call = _bound(node, ("input", "normalized_shape", "weight", "eps"))
    if call.get("eps") is None:
        call["eps"] = torch.finfo(torch.float32).eps  # of the dtype in which torch computes, also for 16 bits
    return _norm(node, call, rms=True)


def _norm(node: fx.Node, call: _Found, *, rms: bool) -> bool:
    x, weight = call["input"], call.get("weight")
    shape = call["normalized_shape"]
    over_rows = isinstance(shape, tuple | list) and len(shape) == 1
    if not (over_rows and isinstance(weight, fx.Node) and _alike(x, node)):
        return False
    return _normalised(node, x, weight, call.get("bias"), call["eps"], rms=rms)


def _rms_norm_of_transformers(node: fx.Node) -> bool:
    found = _found(node, _RMS_NORM_OF_TRANSFORMERS)
    if found is None or not _alike(found["x"], node):
        return False
    same = found["dtype"] == _value_of(node).dtype and _is_row(found["weight"], node)
    return same and _normalised(node, found["x"], found["weight"], None, found["eps"], rms=True)


def _normalised(node: fx.Node, x: fx.Node, weight: fx.Node, bias: Any, eps: Any, *, rms: bool) -> bool:
    if not isinstance(eps, int | float):  # a tensor, or a number that may change
        return False
    with node.graph.inserting_before(node):
        both = _call(node, _NORM, x, None, None, weight, bias, None, None, 0.0, eps, False, rms)
        _replace(node, _call(node, operator.getitem, both, 0))
    return True


def _activation(node: fx.Node) -> bool:
    """An activation behind a linear layer with a bias."""
    found = _activation_of(node)
    if found is None:
        return False
    name, x, parts = found
    x, bias = _without_bias(x, parts)
    return bias is not None and _elementwise(node, x, bias=bias, activation=name)


def _dropped_activation(node: fx.Node) -> bool:
    x, *drop = node.args
    inner = _only_for(x, node)
    if inner is None:
        return False
    if inner.target is _ELEMENTWISE and inner.args[1] is None and inner.args[3] is None:  # `_activation` made it
        x, _, bias, _, _, _, name, _ = inner.args
        return _elementwise(node, x, bias=bias, activation=name, drop=drop)
    found = _activation_of(inner)
    return found is not None and _elementwise(node, found[1], activation=found[0], drop=drop)


def _residual(node: fx.Node) -> bool:
    """A residual sum of dropped values."""
    if len(node.args) != 2 or node.kwargs:
        return False
    for summand, residual in (node.args, node.args[::-1]):
        dropped = _only_for(summand, node)
        same_shape = dropped is not None and _value_of(dropped).shape == _value_of(node).shape
        if dropped is None or dropped.target is not _DROPOUT or not _alike(residual, node) or not same_shape:
            continue
        x, *drop = dropped.args
        if not isinstance(x, fx.Node):
            continue
        x, bias = _without_bias(x, {dropped})
        return _elementwise(node, x, residual=residual, bias=bias, drop=drop)
    return False


def _gate(node: fx.Node) -> bool:
    if len(node.args) != 2 or node.kwargs:
        return False
    for summand, up in (node.args, node.args[::-1]):
        inner = _only_for(summand, node)
        found = None if inner is None else _activation_of(inner)
        if found is not None and _alike(found[1], node) and _alike(up, node):
            with node.graph.inserting_before(node):
                _replace(node, _call(node, _GATED, found[1], up, found[0]))
            return True
    return False


PATTERNS: Final[dict[str, tuple[Callable[[fx.Node], bool], ...]]] = {
    "layer_norm": (_layer_norm,),
    "rms_norm": (_rms_norm,),
    "mul": (_rms_norm_of_transformers, _activation, _gate),
    "gelu": (_activation,),
    "relu": (_activation,),
    "silu": (_activation,),
    str(_DROPOUT): (_dropped_activation,),
    "add": (_residual,),
}
"""What may begin at a call of this name, seen from its result. The first that returns True has replaced the call."""


def _activation_of(node: fx.Node) -> tuple[str, fx.Node, set[fx.Node]] | None:
    """Return the name of an activation, what it is called with, and the nodes that compute it."""
    for name, form in _ACTIVATIONS:
        found = _found(node, form)
        if found is not None and _alike(found["x"], node):
            return name, found.pop("x"), found[_PARTS]
    return None


def _without_bias(x: fx.Node, readers: set[fx.Node]) -> tuple[fx.Node, fx.Node | None]:
    """Return the result of a linear layer without its bias, and the bias; x and None if others read it too."""
    inner = _only_for(x, *readers)
    if inner is None:
        return x, None
    if _name_of(inner) == "view" and isinstance(inner.args[0], fx.Node):  # the linear layer of GPT-2 in transformers
        product = _only_for(inner.args[0], inner)
        if product is None or product.target is not torch.addmm or product.kwargs or len(product.args) != 3:
            return x, None
        bias, rows, weight = product.args
        if not _is_row(bias, x):
            return x, None
        with x.graph.inserting_before(x):
            product = _call(product, torch.mm, rows, weight)
            return _call(x, "view", product, *inner.args[1:]), _as(bias, x)
    if _name_of(inner) == "linear":
        call = _bound(inner, ("input", "weight", "bias"))
        if not _is_row(call.get("bias"), x):
            return x, None
        with x.graph.inserting_before(x):
            return _call(x, inner.target, call["input"], call["weight"], None), _as(call["bias"], x)
    if _name_of(inner) == "add" and len(inner.args) == 2 and not inner.kwargs:
        y, bias = inner.args
        if _is_row(bias, x) and _alike(y, x):
            return y, bias  # type: ignore[return-value]
    return x, None


def _as(bias: Any, x: fx.Node) -> fx.Node:
    """Return a bias in x's dtype, which autocast gives a product."""
    dtype = _value_of(x).dtype
    if _value_of(bias).dtype == dtype:
        return bias  # type: ignore[no-any-return]
    cast: fx.Node = x.graph.call_method("to", (bias, dtype))
    cast.meta["example_value"] = _value_of(bias).to(dtype)
    return cast


def _elementwise(
    node: fx.Node,
    x: Any,
    *,
    residual: Any = None,
    bias: Any = None,
    activation: Any = None,
    drop: Sequence[Any] = (None, None, 0, 0.0),
) -> bool:
    """Replace a call by the op; `drop` are the arguments of `_DROPOUT` behind x."""
    seed, row_R, first_column, p = drop
    arguments = x, residual, bias, seed, row_R, first_column, activation, p
    with node.graph.inserting_before(node):
        _replace(node, _call(node, _ELEMENTWISE, *arguments))
    return True


def _found(node: fx.Node, form: Any) -> _Found | None:
    """Return what the strings of a form stand for, or None if a result has another form; in _PARTS, its nodes."""
    found: _Found = {}
    parts: set[fx.Node] = set()
    if not _matches(node, form, found, parts):
        return None
    left = set(parts)
    while left:
        left.discard(node)
        if _overwrites(node):
            return None
        node = node.prev
    return found | {_PARTS: parts}


def _matches(value: Any, form: Any, found: _Found, parts: set[fx.Node]) -> bool:
    if isinstance(form, str) and form not in ("none", "tanh"):
        return bool(found.setdefault(form, value) == value)
    if not isinstance(form, tuple):
        return type(value) is type(form) and bool(value == form)
    if not isinstance(value, fx.Node) or _name_of(value) != form[0]:
        return False
    parts.add(value)
    arguments = (*value.args, *value.kwargs.values())
    return len(arguments) == len(form) - 1 and all(
        _matches(argument, part, found, parts) for argument, part in zip(arguments, form[1:], strict=True)
    )


def _name_of(node: fx.Node) -> str:
    """Return the name of one of torch's functions or methods, the same for torch.add, + and x.add; else ""."""
    if node.op == "call_method" or isinstance(node.target, OpOverload):
        return str(node.target)
    name = str(getattr(node.target, "__name__", ""))
    # A user's op may have the name of one of torch's.
    return name if any(getattr(owner, name, None) is node.target for owner in _OWNERS) else ""


def _bound(node: fx.Node, names: tuple[str, ...]) -> _Found:
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _only_for(value: Any, *readers: fx.Node) -> fx.Node | None:
    """Return a value's node if only these nodes read it, and nothing is overwritten before they do."""
    if not isinstance(value, fx.Node) or not value.op.startswith("call_") or not set(value.users) <= set(readers):
        return None
    node, left = value, set(value.users)
    while left:
        node = node.next
        left.discard(node)
        if _overwrites(node):
            return None
    return value


def _overwrites(node: fx.Node) -> bool:
    """True if a call may overwrite a tensor: by its schema, its arguments or its name, or because nothing is known."""
    if not node.op.startswith("call_"):
        return False
    if may_write(node.target) or "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    own = name.strip("_")  # iadd and __iadd__ write to their first argument
    if in_place or own == "setitem" or (own.startswith("i") and hasattr(operator, f"__{own[1:]}__")):
        return True
    module = "torch" if node.op == "call_method" else str(getattr(node.target, "__module__", None) or "torch")
    if module == F.__name__:  # where a True may be `inplace`
        return any(argument is True for argument in node.args)
    # Another library's function is a call of its own only where Dynamo was told not to trace it.
    return module.partition(".")[0] not in ("torch", _OWN, "_operator", "builtins", "math")


def _value_of(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _alike(one: Any, other: fx.Node) -> bool:
    """True for a tensor of the other's shape, dtype and device."""
    first, second = _value_of(one), _value_of(other)
    return isinstance(first, Tensor) and (first.shape, first.dtype, first.device) == (
        *(second.shape, second.dtype, second.device),
    )


def _is_row(one: Any, other: fx.Node) -> bool:
    """True for a vector as long as a row of the other."""
    first, second = _value_of(one), _value_of(other)
    return isinstance(first, Tensor) and first.shape == second.shape[-1:]


def _call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Add a call with the example value, the source line and the module of another."""
    graph = like.graph
    node = graph.call_method(target, args) if isinstance(target, str) else graph.call_function(target, args)
    node.meta = dict(like.meta)
    return node


def _replace(node: fx.Node, new: fx.Node) -> None:
    """Put a call in the place of another, and erase what nothing reads then."""
    node.replace_all_uses_with(new)
    unread = [node]
    while unread:
        node = unread.pop()
        if not (node._erased or node.users) and node.op.startswith("call_") and not _overwrites(node):
            inputs = node.all_input_nodes
            node.graph.erase_node(node)
            unread += inputs
