"""inductor_faults -- contexts that keep Inductor and AOTAutograd from their silent faults.

Checked with torch 2.13.0 and 2.14.1. docs/reliability.md lists the faults.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from torch._functorch import config as functorch_config
from torch._ops import HigherOrderOperator
from torch.fx.passes.reinplace import _is_view_op

from .dispatch import tree_leaves


@contextlib.contextmanager
def without_faults() -> Iterator[None]:
    """Compile with Inductor in this context. Dynamo compiles under a lock, so no other thread is affected."""
    with (
        _attention_up_to_four_dimensions(),
        _signed_gradients(),
        _pools_by_kernels(),
        _inputs_written_last(),
        _random_ops_in_order(),
        without_faults_of_autograd(),
    ):
        yield


@contextlib.contextmanager
def without_faults_of_autograd() -> Iterator[None]:
    """Trace with AOTAutograd in this context, for any compiler.

    As in eager PyTorch, backward runs without the autocast around forward: a product of float32 in a region without
    autocast would get a gradient of 16 bits.
    """
    with (
        functorch_config.patch(backward_pass_autocast="off"),
        _views_of_overlapping_inputs(),
        _written_inputs_keep_strides(),
    ):
        yield


def _attention_up_to_four_dimensions() -> AbstractContextManager[Any]:
    """Return a context in which Inductor does not replace an attention of more than four dimensions.

    Its patterns are for four, but some also match five. Their replacements then transpose the wrong dimensions: the
    results are wrong, or nothing compiles.
    """
    from torch._inductor import pattern_matcher

    is_match = pattern_matcher.is_match

    def is_match_that_fits(match: Any) -> Any:
        if not is_match(match):
            return False
        query = match.kwargs.get("query")
        return not isinstance(query, fx.Node) or query.meta["val"].dim() <= 4

    return mock.patch.object(pattern_matcher, "is_match", is_match_that_fits)


def _pools_by_kernels() -> AbstractContextManager[Any]:
    """Return a context in which torch's own kernels compute the gradients of some pools.

    Average pools with `ceil_mode`: in Inductor's code an element that lies only in a smaller window at the end gets no
    gradient, or a wrong one. Adaptive maximum pools in three dimensions: the kernel reads the memory of the indices as
    if they were contiguous, and Inductor gives them the input's layout.
    """
    from torch._inductor import ir, lowering

    replaced: dict[Any, Callable[..., Any]] = {}
    for dimensions in (2, 3):
        op = getattr(torch.ops.aten, f"avg_pool{dimensions}d_backward").default
        own, kernel = lowering.lowerings[op], getattr(lowering, f"fallback_avg_pool{dimensions}d_backward")

        def averaged(*arguments: Any, own: Any = own, kernel: Any = kernel) -> Any:
            ceil_mode = arguments[5]
            return (kernel if ceil_mode else own)(*arguments)

        replaced[op] = averaged
    maximum = torch.ops.aten.adaptive_max_pool3d_backward.default
    run_kernel = lowering.lowerings[maximum]

    def of_maximum(dy: Any, x: Any, indices: Any) -> Any:
        return run_kernel(dy, x, ir.ExternKernel.require_contiguous(indices))

    replaced[maximum] = of_maximum
    return mock.patch.dict(lowering.lowerings, replaced)


def _inputs_written_last() -> AbstractContextManager[Any]:
    """Return a context in which Inductor lets ops work in the memory of an operand only where nothing else sees it.

    A graph of AOTAutograd updates an input by a copy at its end. Inductor lets earlier ops work in the memory of such
    an input, even if their result is still read after the copy, is returned, or is computed from the input. It also
    lets an op write to an expanded operand, whose elements share memory.
    """
    from torch._inductor.fx_passes import reinplace

    let_ops_write = reinplace.reinplace_inplaceable_ops_core

    def let_ops_write_into_copies(graph: fx.Graph) -> None:
        _copy_operands_of_writes(graph, (*reinplace.inplaceable_ops, *reinplace.inplaceable_foreach_ops))
        let_ops_write(graph)

    return mock.patch.object(reinplace, "reinplace_inplaceable_ops_core", let_ops_write_into_copies)


def _copy_operands_of_writes(graph: fx.Graph, ops: Collection[Any]) -> None:
    aten = torch.ops.aten
    results: dict[fx.Node, fx.Node] = {}  # what an input holds in the end
    for update in graph.find_nodes(op="call_function", target=aten.copy_.default):
        written, value = update.args[:2]
        if written.op == "placeholder":
            results[written] = value
    returned = {_source(result) for result in graph.output_node().all_input_nodes}
    of_input = {written: _results_of(written) for written in results}
    for node in list(graph.nodes):
        if node.target in ops:
            written = tree_leaves(node.args[0])
        elif isinstance(node.target, HigherOrderOperator):  # such as a custom op that writes
            written = node.all_input_nodes
        else:
            continue
        for operand in written:
            others = (other for other in node.all_input_nodes if other is not operand)
            shares = operand in results and not (
                _source(results[operand]) is node and node not in returned and of_input[operand].isdisjoint(others)
            )
            if shares or (node.target in ops and _is_expanded(operand)):
                _read_a_copy(node, operand)


def _read_a_copy(node: fx.Node, operand: fx.Node) -> None:
    layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (operand,), layout)
    copy.meta["val"] = operand.meta["val"].clone(**layout)
    node.replace_input_with(operand, copy)


def _is_expanded(node: fx.Node) -> bool:
    value = node.meta["val"]
    return any(isinstance(stride, int) and stride == 0 for stride in value.stride())


def _source(node: fx.Node) -> fx.Node:
    """The node that a value is a view or a part of."""
    while node.target is operator.getitem or _is_view_op(node.target):
        node = node.all_input_nodes[0]
    return node


def _results_of(node: fx.Node) -> set[fx.Node]:
    """All nodes that are computed from a node."""
    results, waiting = set[fx.Node](), [node]
    while waiting:
        new = set(waiting.pop().users) - results
        results |= new
        waiting += new
    return results


def _random_ops_in_order() -> AbstractContextManager[Any]:
    """Return a context in which Inductor's code calls torch's random ops in the graph's order.

    They read and change the generator. Inductor sees no dependence, and calls one before the other where its result is
    used earlier (https://github.com/pytorch/pytorch/issues/192635). Random numbers of Inductor's own have no order, and
    the ops of a nested graph, as of `torch.cond`, only one among themselves.
    """
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering
    from torch._prims.rng_prims import run_and_save_rng_state

    call_function = GraphLowering.call_function
    last_calls: dict[Any, str] = {}

    def call_in_order(self: Any, target: Any, *arguments: Any) -> Any:
        before = len(self.operations)
        result = call_function(self, target, *arguments)
        if target is run_and_save_rng_state or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            for call in self.operations[before:]:
                if isinstance(call, ir.FallbackKernel):
                    if self in last_calls:
                        self.additional_buffer_deps[call.get_operation_name()].add(last_calls[self])
                    last_calls[self] = call.get_name()
        return result

    return mock.patch.object(GraphLowering, "call_function", call_in_order)


def _signed_gradients() -> AbstractContextManager[Any]:
    """Return a context in which a compiled backward reads the gradients' negative bit.

    Inductor's code reads the memory alone. The hook runs for a backward from AOTAutograd's cache too.
    """
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    post_compile = AOTDispatchAutograd.post_compile

    def post_compile_signed(spec: Any, *rest: Any, **options: Any) -> Any:
        if getattr(spec, "compiled_bw_func", None) is not None:
            spec = dataclasses.replace(spec, compiled_bw_func=_signed(spec.compiled_bw_func))
        return post_compile(spec, *rest, **options)

    return mock.patch.object(AOTDispatchAutograd, "post_compile", post_compile_signed)


def _signed(backward: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def run(inputs: list[Any]) -> Any:
        for index, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and value.is_neg():
                inputs[index] = value.resolve_neg()
        return backward(inputs)

    assert getattr(backward, "_boxed_call", False)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _views_of_overlapping_inputs() -> AbstractContextManager[Any]:
    """Return a context in which AOTAutograd returns a view of an input that shares memory with a written input.

    It makes one tensor of both inputs, and would take the view of that tensor as if it were the input.
    """
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch._functorch._aot_autograd.input_output_analysis import create_synthetic_base_metadata as merge

    def merge_without_steps(metadata: Any, places: Any, *rest: Any) -> Any:
        merged, others = merge(metadata, places, *rest)
        for number, info in enumerate(metadata.output_info):
            if info.base_idx is not None and isinstance(places[info.base_idx], tuple):
                # Without the steps of the view it is made from its strides, which count from the start of the memory.
                merged.output_info[number] = dataclasses.replace(merged.output_info[number], view_meta_sequence=None)
        return merged, others

    return mock.patch.object(runtime_wrappers, "create_synthetic_base_metadata", merge_without_steps)


def _written_inputs_keep_strides() -> AbstractContextManager[Any]:
    """Return a context in which AOTAutograd traces a written input with its strides.

    It traces a clone, which is contiguous if the input has gaps in memory. Then `contiguous()` would be traced as the
    clone itself, and a later write would change both.
    """
    from torch._functorch._aot_autograd import graph_capture_wrappers
    from torch._functorch._aot_autograd.utils import maybe_to_fresh_input

    def copied_with_strides(index: int, value: Any, metadata: Any) -> Any:
        copy = maybe_to_fresh_input(index, value, metadata)
        if isinstance(copy, torch.Tensor) and copy.stride() != value.stride():
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
        return copy

    return mock.patch.object(graph_capture_wrappers, "maybe_to_fresh_input", copied_with_strides)
