"""onednn_products -- multiply float32 matrices by oneDNN where a processor is slower in MKL, which torch calls."""

from typing import Any, Final

import torch
import torch.fx as fx

from ..._torch.onednn import has_fast_layout
from ..._torch.tracing import is_known, recompiled, size_hint
from ...ops.linear import PRODUCT_OP, is_faster_in_onednn, onednn_wins
from ..node_kinds import arguments_of, num_bytes

_PRODUCTS: Final = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def onednn_products_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Replace each `mm` and `addmm` that oneDNN computes faster. See Note: [oneDNN on an AMD processor].

    It runs on forward and backward, after the cut, which knows torch's products. Symbolic sizes count with their hint,
    but what oneDNN does not support is excluded for every size. torch's settings count when the graph is compiled, as
    they do for Inductor.
    """
    if not onednn_wins():
        return graph_module
    graph = graph_module.graph
    for target in _PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=target):
            factors = _factors_for_onednn(node)
            if factors is None:
                continue
            with graph.inserting_before(node):
                product = graph.call_function(PRODUCT_OP, factors)
            product.meta.update(node.meta)
            node.replace_all_uses_with(product)
            graph.erase_node(node)
    return recompiled(graph_module)


def copied_bytes(node: fx.Node) -> int:
    """Return the bytes that are copied for a product in oneDNN: `a`, if it is transposed. Used by `peak_bytes`."""
    factors = _factors_for_onednn(node) if node.target in _PRODUCTS and onednn_wins() else None
    return 0 if factors is None or factors[0].meta["val"].is_contiguous() else num_bytes(factors[0])


def _factors_for_onednn(node: fx.Node) -> tuple[Any, ...] | None:
    """Return a, b and the bias of a product that is faster in oneDNN, or None for another product."""
    arguments = arguments_of(node)
    bias: Any = arguments.get("self") if node.target is torch.ops.aten.addmm.default else None
    a, b = (arguments["self"], arguments["mat2"]) if bias is None else (arguments["mat1"], arguments["mat2"])
    scaled = arguments.get("alpha", 1) != 1 or arguments.get("beta", 1) != 1
    tensors = [value.meta["val"] for value in (a, b, bias) if value is not None]
    if scaled or any(not tensor.is_cpu or tensor.dtype != torch.float32 for tensor in tensors):
        return None
    if bias is not None and bias.meta["val"].shape != tensors[1].shape[1:]:
        return None  # a matrix, or one element for all columns
    sizes = (*tensors[0].shape, tensors[1].shape[1])
    if not (is_known(sizes[1] > 0) and has_fast_layout(tensors[1])):
        return None
    return (a, b, bias) if is_faster_in_onednn(*map(size_hint, sizes)) else None
