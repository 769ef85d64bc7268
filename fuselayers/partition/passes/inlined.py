"""inlined -- put a function's ops into a graph. Used by the passes that replace dropout and compress saved values."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor

from ..._torch.tracing import make_fx, rename


def inlined(
    graph: fx.Graph, fn: Callable[..., tuple[Tensor, ...]], arguments: Sequence[fx.Node], name: str
) -> list[fx.Node]:
    """Add a function's ops at the graph's insertion point, with names that begin with `name`; return its results."""
    values = [node.meta["val"] for node in arguments]
    with values[0].fake_mode:  # outside of AOTAutograd it is not active
        traced = make_fx(fn)(*values)
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
    for node in traced.graph.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {"val": node.meta["val"]}
            # A name that is in both forward and backward marks a recomputed value.
            rename(copies[node], f"{name}_{node.name}")
    results: Any = traced.graph.output_node().args[0]
    return [copies[node] for node in results]
