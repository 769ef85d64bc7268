"""cut -- the order of all passes, from a graph of torch's calls to the two graphs that a compiler runs.

    before_trace     on the calls of torch, before AOTAutograd traces forward and backward together
    before_cut       on the traced graph: forward and backward in one, or forward alone
    joint_graph_of   tidies the joint graph and sorts its nodes, from which `choose` chooses the saved values
    split            cuts the graph there, and tidies the two parts
    before_run       on each part, for its compiler

Each pass is described in its file in `passes`. A new one gets a file there and a line here.
"""

from collections.abc import Sequence

import torch.fx as fx

from .._torch.tracing import extract_forward_and_backward
from ..ops.implementations.own_kernels import takes_own_kernels
from .joint_graph import JointGraph, sort_nodes
from .passes import (
    attention_calls_pass,
    checkpoint_tags_pass,
    compress_saved_pass,
    early_getitems_pass,
    joined_kernels_pass,
    keep_mutated_inputs_pass,
    late_recompute_pass,
    merge_equal_nodes_pass,
    nested_recompute_pass,
    one_mask_pass,
    one_permutation_pass,
    onednn_products_pass,
    ops_of_calls_pass,
    plain_dropout_calls_pass,
    replayed_dropout_pass,
    seeded_dropout_calls_pass,
    seeded_dropout_pass,
    stored_tables_pass,
    unread_collectives_pass,
    views_that_copy_pass,
    with_compression,
)


def before_trace(graph_module: fx.GraphModule, *, compiler: str, torch_random: bool) -> fx.GraphModule:
    """Change the calls of torch in a Dynamo graph.

    Args:
        graph_module: the graph; the call changes it.
        compiler: "eager", "inductor" or "nvfuser".
        torch_random: draw torch's dropout masks from torch's generator, in eager's order, not from seeds.
    """
    graph_module = plain_dropout_calls_pass(graph_module)
    graph_module = attention_calls_pass(graph_module, torch_random=torch_random)
    if compiler == "inductor" and not torch_random:  # the trace decomposes what is left
        graph_module = seeded_dropout_calls_pass(graph_module)
    if takes_own_kernels():
        graph_module = ops_of_calls_pass(graph_module)
    return graph_module


def before_cut(graph_module: fx.GraphModule, *, compiler: str, torch_random: bool) -> fx.GraphModule:
    """Replace the masks of a traced graph, with or without a backward; the arguments are those of `before_trace`."""
    if torch_random:
        return replayed_dropout_pass(graph_module)
    return graph_module if compiler == "inductor" else seeded_dropout_pass(graph_module)


def joint_graph_of(
    graph_module: fx.GraphModule,
    *,
    num_forward_outputs: int,
    static_input_indices: Sequence[int] | None,
    compress: str | None = None,
) -> JointGraph:
    """Tidy a joint graph from AOTAutograd, and sort its nodes.

    Args:
        graph_module: the graph; the call changes it.
        num_forward_outputs: how many of its outputs are the forward's; the others are gradients.
        static_input_indices: which of the forward's inputs outlive the call, such as parameters.
        compress: the compression of saved values, or None.
    """
    graph_module.graph.eliminate_dead_code()
    graph_module = keep_mutated_inputs_pass(graph_module)
    graph_module = merge_equal_nodes_pass(graph_module)
    graph_module = checkpoint_tags_pass(graph_module)
    joint = sort_nodes(graph_module, num_forward_outputs=num_forward_outputs, static_input_indices=static_input_indices)
    return joint if compress is None else with_compression(joint, compress)


def split(
    joint: JointGraph, saved_values: Sequence[fx.Node], *, kept: Sequence[fx.Node] = ()
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward module, which also returns the saved values, and the backward module, which takes them.

    With `kept`, backward first recomputes these values and keeps them. It recomputes the others from them right before
    they are read, most of them for the second time.
    """
    forward, backward = extract_forward_and_backward(
        stored_tables_pass(joint.module, joint.made_from_scalars),
        list(saved_values),
        num_fwd_outputs=joint.num_forward_outputs,
        static_inputs=joint.static_inputs,
    )
    backward = unread_collectives_pass(backward, forward)
    if kept:
        backward = nested_recompute_pass(backward, {node.name for node in kept})
    backward = late_recompute_pass(backward)
    backward = one_mask_pass(backward)
    backward = early_getitems_pass(backward)
    backward = joined_kernels_pass(backward)
    forward = one_permutation_pass(forward)
    forward = early_getitems_pass(forward)
    forward = joined_kernels_pass(forward)
    return compress_saved_pass(
        forward,
        backward,
        joint.compress,
        num_forward_outputs=joint.num_forward_outputs,
        static_inputs={node.name for node in joint.static_inputs},
    )


def before_run(graph_module: fx.GraphModule, *, compiler: str) -> fx.GraphModule:
    """Change a graph for its compiler: forward or backward after the cut, or the only graph of a call."""
    if compiler == "nvfuser":
        return merge_equal_nodes_pass(graph_module)
    if compiler == "eager":
        graph_module = views_that_copy_pass(graph_module)
    return onednn_products_pass(graph_module)
