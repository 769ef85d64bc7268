"""tracing -- FX graphs, AOTAutograd's joint graphs, and Inductor."""

import copy
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, cast
from unittest import mock

import torch
import torch.fx as fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import descriptors
from torch._functorch._aot_autograd.utils import make_boxed_func as make_boxed_func
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.proxy_tensor import is_sym_node as is_sym_node
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.fx.graph import _BoxedCodeGen
from torch.utils._triton import has_triton as has_triton
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

from .cpp_files import cpp_files
from .dispatch import FakeTensor, tree_leaves

REALIZED: Final = "inductor_realize_to_strides"
"""A key of a node's meta: Inductor writes the value to memory instead of recomputing it at each read."""


def aot_autograd(*, keep_unused_draws: bool = False, **options: Any) -> Callable[..., Callable[..., Any]]:
    """Return a backend for `torch.compile` that traces forward and backward, and hands each to a compiler.

    With `keep_unused_draws` a random op runs even if its result is unused, as in eager mode: it advances the generator
    for the next random op.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import config as inductor_config

    backend: Callable[..., Any] = aot_autograd(**options)
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


class _ForInductor:
    """A partitioner in the form that Inductor's configuration takes, with its key for Inductor's cache on disk."""

    def __init__(self, cut: Callable[..., Any], key: str | None) -> None:
        from torch._inductor.custom_graph_pass import CustomPartitionerFn

        CustomPartitionerFn.register(_ForInductor)  # a base class would have to be imported with this file
        self._cut, self._key = cut, key

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self._cut(gm, joint_inputs, **kwargs)

    def uuid(self) -> str | None:
        return self._key

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ForInductor":
        return self  # Inductor copies its configuration

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self._key),)


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


def compile_with_inductor(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: Callable[..., Any],
    *,
    key: str,
    fallback_random: bool,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor and our partitioner. Backward is compiled now too, so that its errors show.

    The key identifies the partitioner in Inductor's cache.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_graph(*args: Any, **options: Any) -> Any:
        forget_donated_buffers()
        return compile_fx_inner(*args, **options)

    settings: dict[str, Any] = {"custom_partitioner_fn": _ForInductor(partitioner, key)}
    if fallback_random:
        # In the other layout that Inductor gives convolutions a random op would write its numbers in another order.
        settings |= {"fallback_random": True, "layout_optimization": False}
    # Precompiled headers take 6 s and 156 MB, and save 1.6 s per file. Forward and backward have one file each.
    settings["cpp_cache_precompile_headers"] = False
    if any(isinstance(value, torch.Tensor) and value.is_neg() for value in example_inputs):
        raise NotImplementedError(
            "Inductor ignores the negative bit of an input, a view such as x.conj().imag; "
            "materialise it with .resolve_neg()"
        )
    # The key of AOTAutograd's cache lacks the value of a symbolic float, so the cache would return code for another
    # value (https://github.com/pytorch/pytorch/issues/197889).
    nodes = all_nodes(graph_module)
    has_floats = any(isinstance(node.meta.get("example_value"), torch.SymFloat) for node in nodes)
    own_cache = {"enable_autograd_cache": False} if has_floats else {}
    of_autograd = {
        "force_non_lazy_backward_lowering": True,
        # Our autograd functions run no code besides the traced code. Caching saves a second process 1 s per graph.
        "autograd_cache_allow_custom_autograd_functions": True,
        **own_cache,
    }
    with cpp_files(), _attention_up_to_four_dimensions(), functorch_config.patch(of_autograd):
        compiled = compile_fx(graph_module, list(example_inputs), inner_compile=compile_graph, config_patches=settings)
    return cast(Callable[..., Any], compiled)


def _attention_up_to_four_dimensions() -> AbstractContextManager[Any]:
    """Return a context in which Inductor does not replace an attention of more than four dimensions.

    Its patterns are for four, but some also match five. Their replacements then transpose the wrong dimensions: the
    results are wrong, or nothing compiles. torch.compile has this fault in torch 2.13 and 2.14.
    """
    from torch._inductor import pattern_matcher

    is_match = pattern_matcher.is_match

    def is_match_that_fits(match: Any) -> Any:
        if not is_match(match):
            return False
        query = match.kwargs.get("query")
        return not isinstance(query, fx.Node) or query.meta["val"].dim() <= 4

    # Dynamo compiles under a lock, so no other thread sees it.
    return mock.patch.object(pattern_matcher, "is_match", is_match_that_fits)


@functools.cache
def decompositions_of(names: tuple[str, ...]) -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of ATen ops into simpler ops, by overload. Used by the nvFuser compiler."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions([getattr(torch.ops.aten, name) for name in names]))


# All lowerings share this: fake implementations run outside of the compile lock too, and may register a second lowering
# in the middle of a graph.
_last_of_graph: Final[weakref.WeakKeyDictionary[Any, dict[Any, Any]]] = weakref.WeakKeyDictionary()


def draw_in_inductor(op: torch._ops.OpOverload, *, lowest: int, highest: int) -> None:
    """Make Inductor's code run the calls of an op that draws a number in the graph's order.

    Each call but the first on a device is torch's own `randint_like`, with the result of the previous call as argument:
    that saves the host a call of Python, some 10 us. Calls in a nested graph are ordered among themselves. To save
    memory, Inductor reorders calls that do not depend on each other, even calls of random ops, which read and change
    the generator (https://github.com/pytorch/pytorch/issues/192635).

    The op's fake implementation must call this function: it runs before each lowering, when Inductor is loaded.

    Args:
        op: takes a tensor that it does not read, and the tensor's device; returns an int64 tensor of shape [].
        lowest, highest: of the numbers, highest excluded.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    # Another thread may be in the middle of the import; `fallback_handler` is defined late.
    if not hasattr(lowering, "fallback_handler") or op in lowering.lowerings:
        return
    from torch._inductor.virtualized import V

    run_op = lowering.fallback_handler(op, add_to_fallback_set=False)
    draw_like = lowering.fallback_handler(torch.ops.aten.randint_like.low_dtype, add_to_fallback_set=False)

    def drawn(unread: Any, *, device: torch.device) -> Any:
        last = _last_of_graph.setdefault(V.graph, {})
        place = unread.get_device()  # has an index, which `device` may lack
        last[place] = draw_like(last[place], lowest, highest) if place in last else run_op(unread, device=device)
        return last[place]

    lowering.register_lowering(op, type_promotion_kind=None)(drawn)


class KernelCall(NamedTuple):
    """A launch of a Triton kernel that writes one new tensor.

    Attributes:
        kernel: the kernel; its first parameter is the new tensor, its second the op's first argument.
        grid: programs in x, y and z.
        shape, dtype: of the new tensor.
        constants: the kernel's other arguments by name.
    """

    kernel: Any
    grid: tuple[int, int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    constants: dict[str, Any]


def launch_in_inductor(op: torch._ops.OpOverload, call_of: Callable[..., KernelCall | None]) -> None:
    """Make Inductor's code launch a Triton kernel where a graph calls an op, without the host's time for the op.

    The op's fake implementation must call this function, as for `draw_in_inductor`.

    Args:
        op: its first argument is a tensor; the result is one contiguous tensor on its device.
        call_of: takes the op's arguments, with Inductor's nodes for tensors and symbols for unknown sizes. It returns
            the launch, or None if the op has to run.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if not hasattr(lowering, "fallback_handler") or op in lowering.lowerings:
        return
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

    run_op = lowering.fallback_handler(op, add_to_fallback_set=False)

    def launched(first: Any, *rest: Any, **named: Any) -> Any:
        call = call_of(first, *rest)
        if call is None:
            return run_op(first, *rest, **named)
        result = lowering.empty(list(call.shape), dtype=call.dtype, device=first.get_device())
        names = call.kernel.arg_names
        lowering.lowerings[triton_kernel_wrapper_mutation](
            kernel_idx=kernel_side_table.add_kernel(call.kernel),
            constant_args_idx=kernel_side_table.add_constant_args(call.constants),
            grid=[call.grid],
            tma_descriptor_metadata={},
            kwargs={names[0]: result, names[1]: first},
        )
        return result

    lowering.register_lowering(op, type_promotion_kind=None)(launched)


def cpp_compiler() -> str:
    """Return the C++ compiler that Inductor uses; raises RuntimeError if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


def trace_with_inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], partitioner: Callable[..., Any]
) -> Callable[..., Any]:
    """Run Inductor's passes on a Dynamo graph up to the partitioner; the two graphs run op by op."""
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    def run(graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        return boxed(graph_module)

    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(force_disable_caches=True),
    ):
        settings = {"custom_partitioner_fn": _ForInductor(partitioner, None)}
        compiled = compile_fx(graph_module, list(example_inputs), inner_compile=run, config_patches=settings)
    return cast(Callable[..., Any], compiled)


def all_nodes(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a graph and of its nested graphs."""
    for inner in graph_module.modules():
        if isinstance(inner, fx.GraphModule):
            yield from inner.graph.nodes
