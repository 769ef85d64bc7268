"""joined_kernels -- let neighbouring kernels of this library's ops be one kernel, after the cut.

    forward    s = dropout(x + bias) + residual,  y = norm(s)       the norm's kernel adds and writes s too
    backward   dy = a + b                                           the norm's kernel adds
               ds = norm_backward(dy, s),  g = ds + incoming        the norm's kernel adds
               dx, dbias = dropout_backward(g)                      the norm's kernel drops, and sums for the bias

The partitioner sees the ops apart, so that backward can recompute y from s alone. Only the graphs of the compiler
"triton" have kernels of ops.
"""

import operator
from typing import Any, Final

import torch
import torch.fx as fx
from torch import Tensor

from ..._torch.tracing import recompiled, rename
from ...ops.elementwise import dropout_op
from ..node_kinds import arguments_of, is_fusible, readers_of, storage_of

_NORM: Final = torch.ops.fuselayers.normalise.default
_NORM_BACKWARD: Final = torch.ops.fuselayers.normalise_backward.default
_ELEMENTWISE: Final = torch.ops.fuselayers.bias_activation_dropout.default
_ELEMENTWISE_BACKWARD: Final = torch.ops.fuselayers.bias_activation_dropout_backward.default
_DROPOUT: Final[Any] = dropout_op
_ADD: Final = torch.ops.aten.add.Tensor
_UNBIND: Final = torch.ops.aten.unbind.int


def joined_kernels_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Join the kernels of a forward or a backward graph."""
    graph = graph_module.graph
    norms = graph.find_nodes(op="call_function", target=_NORM)
    backwards = graph.find_nodes(op="call_function", target=_NORM_BACKWARD)
    if not (norms or backwards):
        return graph_module
    for node in norms:
        _join_the_sum_before(node, _positions(graph))
    for node in backwards:
        _join_the_sum_before_backward(node)
        _join_the_sum_of_gradients(node, _positions(graph))
        _join_the_dropout_before(node, _positions(graph))
    return recompiled(graph_module)


def _positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: number for number, node in enumerate(graph.nodes)}


def _join_the_sum_before(norm: fx.Node, position: dict[fx.Node, int]) -> None:
    """Let the norm of a sum compute the sum."""
    call = arguments_of(norm)
    s = call["x"]
    plain = call["residual"] is None and call["bias"] is None and call["seed"] is None and not call["pre"]
    # The norm writes s, so no node before it may read s.
    if not plain or s.op != "call_function" or min(s.users, key=position.__getitem__) is not norm:
        return
    if s.target is _ELEMENTWISE:
        of_sum = arguments_of(s)
        if of_sum["activation"] is not None or of_sum["residual"] is None or of_sum["first_column"]:
            return
        names = ("x", "residual", "bias", "seed", "row_indices", "p")
        call |= {name: of_sum[name] for name in names}
    elif (summands := _summands_in_memory(s)) is not None:
        call |= {"x": summands[0], "residual": summands[1]}
    else:
        return
    norm.args = tuple(call.values())
    element = _element(norm, 1)
    if element is None:
        with norm.graph.inserting_after(norm):
            element = norm.graph.call_function(operator.getitem, (norm, 1))
    element.meta = dict(s.meta)
    _update(norm, 1, s.meta["val"])
    s.replace_all_uses_with(element)
    name = s.name
    norm.graph.erase_node(s)
    rename(element, name)  # a saved value has one name in forward and backward


def _join_the_sum_before_backward(norm: fx.Node) -> None:
    """Let the norm's backward add the gradients of two readers of its result."""
    call = arguments_of(norm)
    dy = call["dy"]
    summands = _summands_in_memory(dy)
    # The sum may have another shape: a linear layer sees rows.
    if summands is None or len(dy.users) != 1 or call["more_dy"] is not None:
        return
    norm.args = tuple((call | {"dy": summands[0], "more_dy": summands[1]}).values())
    norm.graph.erase_node(dy)


def _join_the_sum_of_gradients(norm: fx.Node, position: dict[fx.Node, int]) -> None:
    """Let the norm's backward add the gradient that comes from the other reader of its input."""
    call, dx = arguments_of(norm), _element(norm, 0)
    if call["ds"] is not None or dx is None or len(dx.users) != 1:
        return
    (total,) = dx.users
    if total.target is not _ADD or total.kwargs or not _are_alike(total, *total.args):
        return
    other = total.args[1] if total.args[0] is dx else total.args[0]
    if position[other] > position[norm] or other is dx:  # type: ignore[index]
        return
    norm.args = tuple((call | {"ds": other}).values())
    total.replace_all_uses_with(dx)
    norm.graph.erase_node(total)


def _join_the_dropout_before(norm: fx.Node, position: dict[fx.Node, int]) -> None:
    """Let the norm's backward drop the gradient of a sum, and sum it for the bias."""
    call, ds, sums = arguments_of(norm), _element(norm, 0), _element(norm, 2)
    if call["seed"] is not None or call["residual_dtype"] is not None or ds is None or sums is None:
        return
    dropped = next((user for user in ds.users if _drops_only(user, ds)), None)
    (apart,) = sums.users if len(sums.users) == 1 else (None,)
    if dropped is None or apart is None or apart.target is not _UNBIND:
        return
    drop = arguments_of(dropped)
    dx_dtype, bias_dtype = drop.get("x_dtype", ds.meta["val"].dtype), drop.get("bias_dtype")
    late = any(position[node] > position[norm] for node in (drop["seed"], drop["row_indices"]) if node is not None)
    if late or (bias_dtype is not None and bias_dtype != call["sums_dtype"]):
        return
    joined = {"seed": drop["seed"], "row_indices": drop["row_indices"], "p": drop["p"], "x_dtype": dx_dtype}
    joined |= {"wants_bias": bias_dtype is not None, "residual_dtype": ds.meta["val"].dtype}
    norm.args = tuple((call | joined).values())
    graph = norm.graph
    with graph.inserting_after(ds):
        dx = graph.call_function(operator.getitem, (norm, 0))
    dx.meta = dict(dropped.meta)
    dx.meta["val"] = ds.meta["val"].to(dx_dtype)
    ds.args = (norm, 1)
    _update(norm, 1, ds.meta["val"])
    _update(norm, 0, dx.meta["val"])
    if dropped.target is _DROPOUT:
        dropped.replace_all_uses_with(dx)
    else:
        if bias_dtype is not None:
            number = len(apart.meta["val"])
            one_more: Tensor = sums.meta["val"].new_empty(number + 1, sums.meta["val"].shape[1])
            sums.meta["val"] = one_more
            apart.meta["val"] = one_more.unbind()
            _update(norm, 2, one_more)
            with graph.inserting_after(apart):
                dbias = graph.call_function(operator.getitem, (apart, number))
            dbias.meta = {"val": apart.meta["val"][number]}
        for user in list(dropped.users):
            user.replace_all_uses_with(dx if user.args[1] == 0 else dbias)
            graph.erase_node(user)
    graph.erase_node(dropped)


def _drops_only(node: fx.Node, gradient: fx.Node) -> bool:
    """True if a node is the backward of dropout(x + bias) for a gradient of the whole tensor."""
    if node.target not in (_ELEMENTWISE_BACKWARD, _DROPOUT) or node.args[0] is not gradient:
        return False
    call = arguments_of(node)
    return call.get("activation") is None and not call["first_column"] and call["seed"] is not None


def _summands_in_memory(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the summands of a plain sum, if it would be a kernel of its own, else None."""
    summands: Any = node.args
    if node.target is not _ADD or node.kwargs or not _are_alike(node, *summands):
        return None
    return None if any(map(_is_inside_a_kernel, summands)) else (summands[0], summands[1])


def _is_inside_a_kernel(summand: fx.Node) -> bool:
    """True if the sum is a part of the kernel that computes the summand, for the sum alone."""
    node = storage_of(summand)
    return is_fusible(node) and node.target is not operator.getitem and len(readers_of(node)) == 1


def _are_alike(*nodes: Any) -> bool:
    """True for tensors of one shape and dtype."""
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]
    first = values[0]
    return isinstance(first, Tensor) and all(
        isinstance(value, Tensor) and (value.shape, value.dtype) == (first.shape, first.dtype) for value in values
    )


def _element(node: fx.Node, number: int) -> fx.Node | None:
    users = (user for user in node.users if user.target is operator.getitem and user.args[1] == number)
    return next(users, None)


def _update(node: fx.Node, number: int, value: Any) -> None:
    values = list(node.meta["val"])
    values[number] = value
    node.meta["val"] = tuple(values)
