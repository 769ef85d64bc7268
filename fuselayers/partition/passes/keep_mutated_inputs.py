"""keep_mutated_inputs -- let backward read the value that an input had before forward wrote to it."""

import torch
import torch.fx as fx

from ..._torch.tracing import mutated_inputs, recompiled


def keep_mutated_inputs_pass(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Put a clone between each input that is written to and its readers, so that the clone can be saved.

    In backward the input holds the new value. AOTAutograd therefore clones it, but Inductor's passes remove the clone,
    and autograd then finds that a saved tensor was modified in place. Sizes and strides are still read from the input,
    since the clone of an input with gaps in memory has none.
    """
    graph = graph_module.graph
    placeholders: list[fx.Node] = list(graph.find_nodes(op="placeholder"))
    last = placeholders[-1] if placeholders else None
    for node in mutated_inputs(graph):
        readers = [user for user in node.users if not _writes_to(user, node) and _has_elements(user)]
        if not readers or all(user.target is torch.ops.aten.clone.default for user in readers):
            continue
        with graph.inserting_after(last):
            clone = last = graph.call_function(torch.ops.aten.clone.default, (node,))
        clone.meta.update({"val": node.meta["val"].clone(), "partitioner_tag": "is_forward"})
        for reader in readers:
            reader.replace_input_with(node, clone)
    return recompiled(graph_module)


def _has_elements(user: fx.Node) -> bool:
    """False for the output node, and for a size or a stride."""
    return user.op != "output" and not isinstance(user.meta.get("val"), int | torch.SymInt)


def _writes_to(user: fx.Node, node: fx.Node) -> bool:
    return user.target is torch.ops.aten.copy_.default and user.args[0] is node
