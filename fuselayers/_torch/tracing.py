"""tracing -- FX graphs and AOTAutograd's joint graphs."""

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx as fx
from torch._functorch._aot_autograd import descriptors
from torch._functorch._aot_autograd.utils import make_boxed_func as make_boxed_func
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.proxy_tensor import is_sym_node as is_sym_node
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.fx.graph import _BoxedCodeGen
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

from .dispatch import FakeTensor, tree_leaves
from .inductor_faults import without_faults_of_autograd


def aot_autograd(*, keep_unused_draws: bool = False, **options: Any) -> Callable[..., Callable[..., Any]]:
    """Return a backend for `torch.compile` that traces forward and backward, and hands each to a compiler.

    With `keep_unused_draws` a random op runs even if its result is unused, as in eager mode: it advances the generator
    for the next random op.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import config as inductor_config

    traced: Callable[..., Any] = aot_autograd(**options)

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with without_faults_of_autograd():
            compiled: Callable[..., Any] = traced(graph_module, example_inputs)
            return compiled

    # `Graph.eliminate_dead_code` keeps random ops only with this setting, for every compiler.
    return inductor_config.patch(fallback_random=True)(backend) if keep_unused_draws else backend


def _partitioners() -> Any:
    """Return torch's partitioners, whose private names are not exported. They import sympy."""
    from torch._functorch import partitioners

    return partitioners


@functools.cache
def known_ops() -> Any:
    """Return the ops that torch's partitioners know: views, fusible ones, expensive ones."""
    return _partitioners().get_default_op_list()


def overload_packet(node: fx.Node) -> Any:
    """Return a node's op without its overload: aten.add for aten.add.Tensor."""
    return getattr(node.target, "overloadpacket", node.target)


def must_recompute(node: fx.Node) -> bool:
    """True if the user's checkpoint says that a node is recomputed."""
    recompute = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get("recompute") in recompute


def size_of(node: fx.Node) -> int:
    """Return a node's bytes, as torch's partitioners count them."""
    return int(_partitioners()._size_of(node))


def torch_default_partition(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
    """torch's default partitioner: saves what forward computed."""
    return _partitioners().default_partition(joint_module, joint_inputs, **options)


def torch_min_cut_partition(joint_module: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
    """torch's minimum-cut partitioner, the one of `torch.compile`."""
    return _partitioners().min_cut_rematerialization_partition(joint_module, joint_inputs, **options)


def is_opaque(node: fx.Node) -> bool:
    """True for a value that is not a tensor and costs no memory to save.

    Such values are device meshes, script objects, and the state that compiled autograd passes to hooks.
    """
    return _is_opaque_to_torch(node) or isinstance(node.meta.get("val"), BackwardState | FakeScriptObject)


def _is_opaque_to_torch(node: fx.Node) -> bool:
    # torch 2.11 has no opaque nodes.
    return bool(getattr(_partitioners(), "is_opaque_node", lambda node: False)(node))


def mutated_inputs(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the placeholders that are overwritten: by a copy in forward, or by AOTAutograd after forward."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {node.args[0] for node in copies if placement(node) != "must_be_in_backward"}
    described = tree_leaves(graph.output_node().meta.get("desc"))
    inputs = [output.mutated_input for output in described if isinstance(output, descriptors.InputMutationAOTOutput)]
    written.update(node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in inputs)
    return tuple(node for node in graph.find_nodes(op="placeholder") if node in written)


def may_overlap(x: torch.Tensor) -> bool:
    """Return whether elements of a tensor may share memory. True also for some rare layouts in which none do.

    >>> may_overlap(torch.zeros(9).unfold(0, 4, 1)), may_overlap(torch.zeros(4, 6)[:, 1:].t())
    (True, False)
    """
    dimensions = ((size_hint(stride), size_hint(size)) for stride, size in zip(x.stride(), x.shape, strict=True))
    furthest = 0  # element of the dimensions so far
    for stride, size in sorted(pair for pair in dimensions if pair[1] > 1):
        if stride <= furthest:
            return True
        furthest += stride * (size - 1)
    return False


def forget_donated_buffers() -> None:
    """Keep the backward that is being compiled from reusing the memory of saved tensors.

    It may then run twice (`retain_graph=True`). The reuse saves less than 2 % of a step's peak, and no time.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None and context.fw_metadata.bw_donated_idxs:
        context.fw_metadata.bw_donated_idxs.clear()


def size_hint(size: "int | torch.SymInt") -> int:
    """Return the number that a symbolic size was traced with, or 4096 if it is unknown, as in torch's partitioners."""
    if isinstance(size, int):
        return size
    from torch.fx.experimental import symbolic_shapes  # imports sympy

    # Before torch 2.13 the function is named hint_int.
    name = "optimization_hint" if hasattr(symbolic_shapes, "optimization_hint") else "hint_int"
    return int(getattr(symbolic_shapes, name)(size, fallback=4096))


def is_known(condition: "bool | torch.SymBool") -> bool:
    """Return whether a comparison of symbolic sizes is true for every size of the graph; adds no guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(condition)


def copy_of(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a deep copy that shares the constant tensors of the graph, which cannot be copied under a fake mode.

    A copy of a Dynamo graph keeps the sources of its inputs. fx does not copy them, and without them AOTAutograd treats
    parameters as arguments.
    """
    held = [value for value in vars(graph_module).values() if isinstance(value, torch.Tensor)]
    held += [*graph_module.parameters(), *graph_module.buffers()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns about its own tree specifications
        copied = copy.deepcopy(graph_module, {id(tensor): tensor for tensor in held})
    if hasattr(graph_module, "_param_name_to_source"):
        copied._param_name_to_source = graph_module._param_name_to_source
        inputs = (module.graph.find_nodes(op="placeholder") for module in (graph_module, copied))
        for original, node in zip(*inputs, strict=True):
            node._dynamo_source = original._dynamo_source
    return copied


def boxed(graph_module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a function that runs a graph op by op and frees each value after its last use.

    It takes its inputs as one list and empties the list, as AOTAutograd requires.
    """
    graph_module.graph.set_codegen(_BoxedCodeGen())
    graph_module.recompile()

    def run(inputs: list[Any]) -> Any:
        return graph_module.forward(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def of_one_list(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled graph as a function of one list of inputs. A boxed function is returned unchanged."""
    return run if getattr(run, "_boxed_call", False) else cast(Callable[..., Any], make_boxed_func(run))


def recompiled(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Lint a changed graph, and return its module with new code."""
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def rename(node: fx.Node, name: str) -> None:
    """Rename a node. If another node has the name, a number is appended."""
    node._rename(name)


def forward_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders that forward takes: its inputs, then the random state that AOTAutograd may add."""
    placeholders = graph.find_nodes(op="placeholder")
    own = [node for node in placeholders if _partitioners()._is_primal(node)]
    return own + [node for node in placeholders if _partitioners()._is_fwd_seed_offset(node)]


def placement(node: fx.Node) -> str | None:
    """Return AOTAutograd's tag of a node: "is_forward", "is_backward", "must_be_in_forward", ..."""
    tag = node.meta.get("partitioner_tag")
    return None if tag is None else str(tag)


def is_tagged_backward(node: fx.Node) -> bool:
    """True if the node was traced while autograd ran backward."""
    tag = placement(node)
    # Dynamo leaves the backward of an `autograd.Function` untagged; all forward nodes are tagged by then.
    return tag in ("is_backward", "must_be_in_backward") or (tag is None and "seq_nr" in node.meta)


def is_gradient_input(node: fx.Node) -> bool:
    """True for a placeholder that receives the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def extract_forward_and_backward(
    joint_module: fx.GraphModule, saved_values: list[fx.Node], *, num_fwd_outputs: int, static_inputs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut the joint graph into a forward that also returns `saved_values` and a backward that takes them."""
    partitioners = _partitioners()
    symbols = [node for node in saved_values if is_sym_node(node)]
    # The state for hooks stays among the tensors: torch separates it itself.
    opaque = [node for node in saved_values if _is_opaque_to_torch(node)]
    others = {*symbols, *opaque}
    tensors = [node for node in saved_values if node not in others]
    options: dict[str, Any] = {"saved_sym_nodes": symbols, "num_fwd_outputs": num_fwd_outputs}
    options["static_lifetime_input_nodes"] = static_inputs
    if "saved_opaque_nodes" in inspect.signature(partitioners._extract_fwd_bwd_modules).parameters:  # from 2.12 on
        options["saved_opaque_nodes"] = opaque
    replays_random_ops = partitioners.has_recomputable_rng_ops(joint_module)
    # Lazy: the Python code is generated at the first call, not after every pass. On 8,000 nodes this halves the time of
    # the cut.
    with _use_lazy_graph_module(True):
        forward, backward = partitioners._extract_fwd_bwd_modules(joint_module, tensors, **options)
    if replays_random_ops:
        # The pass needs a fake mode for the generator's state, and outside of AOTAutograd none is active.
        values = (node.meta.get("val") for node in joint_module.graph.nodes)
        with next(value.fake_mode for value in values if isinstance(value, FakeTensor)):
            forward, backward = partitioners.functionalize_rng_ops(joint_module, forward, backward, len(symbols))
    forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


@functools.cache
def decompositions_of(names: tuple[str, ...]) -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of ATen ops into simpler ops, by overload. Used by the nvFuser compiler."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions([getattr(torch.ops.aten, name) for name in names]))


def all_nodes(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a graph and of its nested graphs."""
    for inner in graph_module.modules():
        if isinstance(inner, fx.GraphModule):
            yield from inner.graph.nodes
