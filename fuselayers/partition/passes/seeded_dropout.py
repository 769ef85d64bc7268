"""seeded_dropout -- replace torch's dropout by a mask that can be recomputed, so that no mask is saved for backward.

torch's op returns a mask of one byte per element, drawn from a generator whose state has changed by the time of
backward. Three nodes replace it: a seed of a few bytes, the mask made from it, and the product. The partitioner saves
the seed and recomputes the mask.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.fx as fx
from torch import Tensor

from ..._torch.dispatch import disable_current_modes
from ..._torch.tracing import CheckpointPolicy, all_nodes, recompiled, size_hint
from ...ops import draw_seed, keep_scale
from ...ops.dropout import dropout_reference
from ...ops.implementations import dispatch
from .inlined import inlined

SEED_OP: Final = torch.ops.fuselayers.draw_seed.default
"""The op that draws a seed for a mask."""


def seeded_dropout_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Make every mask from a seed of 8 bytes. It is a pure function of the seed, so backward can recompute it."""

    def mask(graph: fx.Graph, x: fx.Node, p: float) -> tuple[fx.Node, float]:
        def made(x: Tensor) -> tuple[Tensor]:
            # Each draw has a separate operand, so that no pass of torch merges two draws.
            seed = SEED_OP(torch.empty((), dtype=torch.int64, device=x.device), device=x.device)
            return (torch.ops.fuselayers.keep_mask.default(seed, x.shape, p),)

        (drawn,) = inlined(graph, made, [x], "mask")
        return drawn, keep_scale(p)

    return _replace_dropout(graph_module, mask, backward_too=True)


def plain_dropout_calls_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite three forms of `F.dropout` in a Dynamo graph before they are traced.

    - `inplace=True` becomes the plain form and a copy into x. Traced in place, it would be a product with a mask of
      floats, which no pass recognises as a mask.
    - With p = 0 or in evaluation it is removed. Traced, it would be a copy of x, kept for backward beside x; eager
      returns x itself.
    - With p = 1 it becomes a product with zero. Traced, it would draw a mask; eager draws none.
    """
    for node, arguments in _dropout_calls(graph_module):
        graph, x = node.graph, arguments.pop("input")
        if arguments.get("training", arguments.get("train", True)) is False or arguments.get("p") == 0:
            node.replace_all_uses_with(x)
            graph.erase_node(node)
        elif arguments.get("p") == 1:
            with graph.inserting_before(node):
                zero = graph.call_method("new_zeros", (x, ()))  # as in eager, the product has x's dtype and its NaNs
            node.op, node.target = "call_method", "mul_" if arguments.get("inplace") else "mul"
            node.args, node.kwargs = (x, zero), {}
        elif arguments.get("inplace"):
            node.args, node.kwargs = (x,), arguments | {"inplace": False}
            with graph.inserting_after(node):
                written = graph.call_method("copy_", (x, node))
            written.meta.update(node.meta)
            node.replace_all_uses_with(written, delete_user_cb=lambda user, written=written: user is not written)
    return recompiled(graph_module)


def seeded_dropout_calls_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Use the masks of `seeded_dropout_pass` in a Dynamo graph, where a compiler has not decomposed `F.dropout` yet.

    Inductor's own random numbers cost a Philox call per element on a CPU: dropout of 2048x1024 float32 takes 10.1 ms in
    eager, 8.0 ms compiled by torch, and 2.0 ms with these masks (two cores of an AMD EPYC). On a GPU they repeat in
    torch 2.13 and later (https://github.com/pytorch/pytorch/issues/198333). There the dropout becomes the node of this
    library's op, with a node for its seed.
    """
    for node, arguments in _dropout_calls(graph_module):
        x, p = arguments["input"], arguments.get("p", 0.5)
        # `torch.dropout` has no default for training; `F.dropout` has True.
        drops = arguments.get("training", arguments.get("train", True)) is True and isinstance(p, float) and 0 < p < 1
        value = x.meta.get("example_value") if isinstance(x, fx.Node) else None
        if not drops or arguments.get("inplace") or value is None:
            continue
        if not dispatch.is_on_gpu(value):
            node.target, node.args, node.kwargs = _dropout, (x, p), {}
            continue
        with node.graph.inserting_before(node):
            seed = node.graph.call_function(draw_seed, (), {"device": value.device})
        node.target, node.args, node.kwargs = dispatch.node_of("dropout"), (x, seed, None, 0, p), {}
    return recompiled(graph_module)


def _dropout_calls(graph_module: fx.GraphModule) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The calls of dropout in a Dynamo graph, with their arguments by name; a pass may erase them.

    A checkpointed region is a graph of its own.
    """
    dropouts = (torch.nn.functional.dropout, torch.dropout)
    for node in [node for node in all_nodes(graph_module) if node.target in dropouts]:
        yield node, dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs


def _dropout(x: Tensor, p: float) -> Tensor:
    return dropout_reference(x, p, seed=draw_seed(device=x.device))


def replayed_dropout_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Draw every mask from torch's generator as eager does, and tag it to be recomputed in backward.

    Torch then saves the generator's state for each mask (5 KB on the CPU) and replays it. On a GPU nothing is replaced:
    only torch's fused kernel, which saves its mask, gives eager's numbers there.
    """

    def mask(graph: fx.Graph, x: fx.Node, p: float) -> tuple[fx.Node, float] | None:
        value = x.meta["val"]
        if value.device.type != "cpu":
            return None
        # Eager's mask has the same order of dimensions in memory as x.
        strides = [size_hint(stride) for stride in torch.empty_like(value).stride()]
        order = list(range(value.dim()))
        if _draws_in_memory_order():
            order.sort(key=strides.__getitem__, reverse=True)

        def made(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            empty = torch.empty([x.shape[dim] for dim in order], dtype=torch.bool, device="cpu")
            drawn = torch.bernoulli(empty, 1.0 - p)
            if order == sorted(order):
                return empty, drawn, drawn
            return empty, drawn, drawn.permute([order.index(dim) for dim in range(x.dim())])

        empty, drawn, permuted = inlined(graph, made, [x], "mask")
        for node in (empty, drawn):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0
        return permuted, 1.0 / (1.0 - p)

    return _replace_dropout(graph_module, mask)


@functools.cache
def _draws_in_memory_order() -> bool:
    """True if torch fills a transposed mask in memory order. Intel's MKL fills it in index order."""
    with disable_current_modes():
        mask, transposed = torch.empty(8, 8, device="cpu"), torch.empty(8, 8, device="cpu").t()
        for tensor in (mask, transposed):
            tensor.bernoulli_(0.5, generator=torch.Generator().manual_seed(0))
        return torch.equal(mask, transposed.t())


def _replace_dropout(
    graph_module: fx.GraphModule,
    make_mask: Callable[[fx.Graph, fx.Node, float], tuple[fx.Node, float] | None],
    *,
    backward_too: bool = False,
) -> fx.GraphModule:
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.native_dropout.default):
        x, p, training = node.args
        # Unread, the op still advances the generator. Inductor would run the replay of an unread mask too late.
        if training is False or not 0 < p < 1 or not node.users:
            continue
        with graph.inserting_before(node):
            made = make_mask(graph, x, p)
            if made is None:
                continue
            mask, scale = made
            out = _drop(graph, x, mask, scale, like=node)
            _copy_place(mask, node)
        for user in list(node.users):
            user.replace_all_uses_with(out if user.args[1] == 0 else mask)
            graph.erase_node(user)
        graph.erase_node(node)
        # torch's backward op scales by 1 / (1 - p), which differs a little from this mask's scale, and in x's dtype.
        for user in [user for user in mask.users if backward_too and user.target is _BACKWARD]:
            with graph.inserting_before(user):
                user.replace_all_uses_with(_drop(graph, user.args[0], mask, scale, like=user))
            graph.erase_node(user)
    return recompiled(graph_module)


_BACKWARD: Final = torch.ops.aten.native_dropout_backward.default


def _drop(graph: fx.Graph, x: Any, mask: fx.Node, scale: float, *, like: fx.Node) -> fx.Node:
    """Add x * mask * scale in the place of a node."""

    def dropped(x: Tensor, mask: Tensor) -> tuple[Tensor]:
        # The factor is float32: a scale rounded to bfloat16 would shift the mean.
        wide = torch.promote_types(x.dtype, torch.float32)
        return (cast(cast(x, wide) * (cast(mask, wide) * scale), x.dtype),)

    (out,) = inlined(graph, dropped, [x, mask], "dropped")
    _copy_place(out, like)
    return out


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in another dtype, by the op that Inductor has in its graphs after decomposition."""
    return x if x.dtype == dtype else torch.ops.prims.convert_element_type.default(x, dtype)


def _copy_place(new: fx.Node, node: fx.Node) -> None:
    """Copy the source line, the checkpointed region and the side of the cut."""
    for key in ("stack_trace", "seq_nr", "partitioner_tag", "recompute", "ac_graph_id"):
        if key in node.meta:
            new.meta.setdefault(key, node.meta[key])
